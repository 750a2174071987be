//! The description of the REST API, made from the handlers.

use axum::Extension;
use axum::http::header;
use axum::response::IntoResponse;
use bytes::Bytes;
use utoipa::OpenApi;
use utoipa::openapi::schema::{Discriminator, Schema};
use utoipa::openapi::{Content, Ref, RefOr, ResponseBuilder};

/// What the description says of the whole.
#[derive(OpenApi)]
#[openapi(
    info(
        title = "Muster",
        description = "Jobs of a Muster server: look at them and steer them. Errors are RFC 9457 problem details \
                       (application/problem+json). Times are microseconds since the Unix epoch. Lists come in pages: give \
                       the `next` of one as `after` of the following. Answers to GET have weak entity tags."
    ),
    tags(
        (name = "jobs"), (name = "runs"), (name = "tasks"), (name = "barriers"), (name = "devices"), (name = "keys"),
        (name = "exclusions", description = "Who takes no part, and why"),
        (name = "drain", description = "Coordinated saves"),
        (name = "findings", description = "What is found in what is measured"),
        (name = "events"), (name = "audit"), (name = "server"),
    )
)]
#[openapi(components(schemas(super::Problem)))]
struct Head;

/// The description without its paths.
pub(super) fn head() -> utoipa::openapi::OpenApi {
    Head::openapi()
}

/// The description as it is sent.
#[derive(Clone)]
pub(super) struct Document(Bytes);

impl Document {
    pub fn new(mut described: utoipa::openapi::OpenApi) -> Self {
        describe_problems(&mut described);
        tell_kinds_apart(&mut described, "Change", "kind");
        // Axum writes a path's rest as `{*key}`, which no description knows.
        let text = described.to_json().unwrap_or_default();
        Self(text.replace("{*key}", "{key}").into())
    }

    /// The description as JSON.
    pub fn bytes(&self) -> &[u8] {
        &self.0
    }
}

/// Every error is a problem document: it need not be said at each of them.
fn describe_problems(described: &mut utoipa::openapi::OpenApi) {
    let problem = || RefOr::T(Content::new(Some(Ref::from_schema_name("Problem"))));
    for item in described.paths.paths.values_mut() {
        let operations = [&mut item.get, &mut item.put, &mut item.post, &mut item.delete, &mut item.patch];
        for operation in operations.into_iter().flatten() {
            let any = ResponseBuilder::new().description("What went wrong, and what to do");
            operation.responses.responses.entry("default".to_owned()).or_insert_with(|| any.build().into());
            for (status, response) in &mut operation.responses.responses {
                if let RefOr::T(response) = response
                    && !status.starts_with('2')
                {
                    response.content.insert("application/problem+json".to_owned(), problem());
                }
            }
        }
    }
}

/// Gives each of the objects that a schema may be a name of its own, and says which field tells them apart: without that,
/// who reads the description gets one type for all of them.
fn tell_kinds_apart(described: &mut utoipa::openapi::OpenApi, name: &str, field: &str) {
    let Some(components) = &mut described.components else { return };
    let Some(RefOr::T(Schema::OneOf(whole))) = components.schemas.get_mut(name) else { return };
    let mut named = Vec::new();
    for item in &mut whole.items {
        // How a kind is told is easier to find in what is sent than in the types that describe it.
        let json = serde_json::to_value(&*item).unwrap_or_default();
        let kind = json.pointer(&format!("/properties/{field}/enum/0")).and_then(serde_json::Value::as_str);
        let Some(kind) = kind.map(str::to_owned) else { continue };
        let of_kind = format!("{name}.{kind}");
        let schema = std::mem::replace(item, RefOr::Ref(Ref::from_schema_name(&of_kind)));
        named.push((kind, of_kind, schema));
    }
    let path = |of_kind: &str| format!("#/components/schemas/{of_kind}");
    let mapping = named.iter().map(|(kind, of_kind, _)| (kind.clone(), path(of_kind)));
    whole.discriminator = Some(Discriminator::with_mapping(field, mapping));
    components.schemas.extend(named.into_iter().map(|(_, of_kind, schema)| (of_kind, schema)));
}

/// This description
#[utoipa::path(get, path = "/api/v1/openapi.json", operation_id = "description_show", tag = "server",
    responses((status = 200, description = "The REST API as an OpenAPI document")))]
pub(super) async fn show(Extension(document): Extension<Document>) -> impl IntoResponse {
    ([(header::CONTENT_TYPE, "application/json")], document.0)
}
