//! Builds the OpenAPI document from the annotations of the handlers.
//!
//! `route_builder.rs` registers the routes. Begin at `OpenApiDocument`.

use std::collections::BTreeSet;

use axum::Extension;
use axum::http::{Method, header};
use axum::response::IntoResponse;
use bytes::Bytes;
use utoipa::OpenApi;
use utoipa::PartialSchema;
use utoipa::openapi::path::{Operation, PathItem};
use utoipa::openapi::schema::{Discriminator, Schema};
use utoipa::openapi::security::{
    ApiKey, ApiKeyValue, HttpAuthScheme, HttpBuilder, SecurityRequirement, SecurityScheme,
};
use utoipa::openapi::{Content, Ref, RefOr, ResponseBuilder};

/// The description of the whole API.
#[derive(OpenApi)]
#[openapi(
    info(
        title = "Muster",
        description = "Jobs of a Muster server: look at them and steer them. Errors are RFC 9457 problem details \
                       (application/problem+json). Times are microseconds since the Unix epoch. Lists come in pages: give \
                       the `next` of one as `after` of the following. Answers to GET have weak entity tags, to be asked about \
                       with If-None-Match; they cannot make a change conditional, so that a change with an If-Match other \
                       than * is answered 412. A server with --tokens-file asks who comes: by a bearer token, or by the \
                       cookie of a login, with which a change must also show its proof in the header x-csrf-token."
    ),
    tags(
        (name = "jobs"), (name = "runs"), (name = "tasks"), (name = "barriers"), (name = "devices"), (name = "keys"),
        (name = "exclusions", description = "Who takes no part, and why"),
        (name = "drain", description = "Coordinated saves"),
        (name = "collectives", description = "How far the communicators of NCCL have come, and which tasks hold them up"),
        (name = "stacks", description = "What the threads of the tasks are doing"),
        (name = "findings", description = "What is found in what is measured"),
        (name = "events"), (name = "audit"), (name = "server"),
    )
)]
#[openapi(components(schemas(super::api::Problem)))]
struct OpenApiHead;

/// Returns the description without its paths.
pub(super) fn document_without_paths() -> utoipa::openapi::OpenApi {
    OpenApiHead::openapi()
}

/// The OpenAPI document as JSON bytes.
#[derive(Clone)]
pub(super) struct OpenApiDocument(Bytes);

impl OpenApiDocument {
    pub fn new(mut described: utoipa::openapi::OpenApi) -> Self {
        add_problem_responses(&mut described);
        add_security_schemes(&mut described);
        name_schema_variants(&mut described, "Change", "kind");
        // Axum writes a path's rest as `{*key}`, which OpenAPI does not define.
        let text = described.to_json().unwrap_or_default();
        Self(text.replace("{*key}", "{key}").into())
    }

    /// Returns the description as JSON.
    pub fn json_bytes(&self) -> &[u8] {
        &self.0
    }
}

/// Returns the operations of a path, by method.
pub(super) fn operations_by_method(item: &mut PathItem) -> impl Iterator<Item = (Method, &mut Operation)> {
    let PathItem { get, put, post, delete, patch, .. } = item;
    let methods = [
        (Method::GET, get),
        (Method::PUT, put),
        (Method::POST, post),
        (Method::DELETE, delete),
        (Method::PATCH, patch),
    ];
    methods.into_iter().filter_map(|(method, operation)| Some((method, operation.as_mut()?)))
}

/// Adds the problem document as the error response of every operation.
fn add_problem_responses(described: &mut utoipa::openapi::OpenApi) {
    let problem = || RefOr::T(Content::new(Some(Ref::from_schema_name("Problem"))));
    for item in described.paths.paths.values_mut() {
        for (_, operation) in operations_by_method(item) {
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

/// Adds the security schemes: a token, or the cookie of a session. A server without tokens requires neither.
fn add_security_schemes(described: &mut utoipa::openapi::OpenApi) {
    let Some(components) = &mut described.components else { return };
    let bearer =
        HttpBuilder::new().scheme(HttpAuthScheme::Bearer).description(Some("A token of `muster token new`"));
    let cookie = |name: &str, how: &str| {
        SecurityScheme::ApiKey(ApiKey::Cookie(ApiKeyValue::with_description(name, how)))
    };
    components.add_security_scheme("bearer", SecurityScheme::Http(bearer.build()));
    components.add_security_scheme("cookie", cookie("__Host-muster", "What /login sets under TLS"));
    components
        .add_security_scheme("cookie-plaintext", cookie("muster-session", "What /login sets without TLS"));
    let one = |name: &str| SecurityRequirement::new(name, Vec::<String>::new());
    let ways = [SecurityRequirement::default(), one("bearer"), one("cookie"), one("cookie-plaintext")];
    described.security = Some(ways.into());
}

/// Returns the kinds of a type that a field distinguishes.
pub(super) fn variant_kind_names<T: PartialSchema>(field: &str) -> BTreeSet<String> {
    let RefOr::T(Schema::OneOf(whole)) = T::schema() else { return BTreeSet::new() };
    whole.items.iter().filter_map(|item| kind_name(item, field)).collect()
}

/// Returns the kind of a schema. The JSON form shows it more directly than the types of utoipa.
fn kind_name(item: &RefOr<Schema>, field: &str) -> Option<String> {
    let json = serde_json::to_value(item).unwrap_or_default();
    json.pointer(&format!("/properties/{field}/enum/0"))?.as_str().map(str::to_owned)
}

/// Names each variant of a schema and declares the field that distinguishes them. Otherwise client generators
/// produce one type for all variants.
fn name_schema_variants(described: &mut utoipa::openapi::OpenApi, name: &str, field: &str) {
    let Some(components) = &mut described.components else { return };
    let Some(RefOr::T(Schema::OneOf(whole))) = components.schemas.get_mut(name) else { return };
    let mut named = Vec::new();
    for item in &mut whole.items {
        let Some(kind) = kind_name(item, field) else { continue };
        let of_kind = format!("{name}.{kind}");
        let schema = std::mem::replace(item, RefOr::Ref(Ref::from_schema_name(&of_kind)));
        named.push((kind, of_kind, schema));
    }
    let path = |of_kind: &str| format!("#/components/schemas/{of_kind}");
    let mapping = named.iter().map(|(kind, of_kind, _)| (kind.clone(), path(of_kind)));
    whole.discriminator = Some(Discriminator::with_mapping(field, mapping));
    components.schemas.extend(named.into_iter().map(|(_, of_kind, schema)| (of_kind, schema)));
}

/// The OpenAPI document
#[utoipa::path(get, path = "/api/v1/openapi.json", operation_id = "description_show", tag = "server",
    responses((status = 200, description = "The REST API as an OpenAPI document")))]
pub(super) async fn show_document(Extension(document): Extension<OpenApiDocument>) -> impl IntoResponse {
    ([(header::CONTENT_TYPE, "application/json")], document.0)
}
