//! Tests of every route, both those in the OpenAPI description and the others.

use std::collections::BTreeSet;

use http::StatusCode;
use muster::http::{RequiredAccess, TransportSecurity, route_access_table};
use muster::service::AccessRole;
use serde_json::{Value, json};

use crate::in_process_http_port::{HOST, InProcessHttpPort};

/// One operation.
pub struct RouteOperation {
    pub method: String,
    pub path: String,
    body: String,
    /// The route requires no role.
    pub public: bool,
}

impl RouteOperation {
    fn new(need: RequiredAccess, method: &str, path: &str) -> Self {
        let body = valid_request_body(method, path);
        let path = match (method, path) {
            ("DELETE", path) => format!("{path}?reason=why"),
            (_, path) if path.ends_with("/keys/value") => format!("{path}?key=k"),
            (_, path) if path.ends_with("/stacks/requests") => format!("{path}?task=0"),
            _ => path.to_owned(),
        };
        Self { method: method.into(), path, body, public: need == RequiredAccess::Public }
    }

    pub fn changes_state(&self) -> bool {
        self.method != "GET"
    }

    /// Returns whether programs report by this operation, with the role of a viewer.
    pub fn is_report(&self) -> bool {
        self.path.ends_with("/stacks/answers")
    }
}

/// Returns an operation for every route, with valid path values and a body that passes as many checks as
/// possible, and some operations that do not exist.
pub async fn operations_of_all_routes(house: &InProcessHttpPort) -> Vec<RouteOperation> {
    let admin = house.authorization_header(AccessRole::Admin);
    let guide = house.send("GET", "/guide/start", &[("authorization", &admin)], "").await.body;
    let named = |start: &str| -> BTreeSet<&str> {
        let links = guide.split('"').filter_map(|text| text.strip_prefix(start));
        links.filter_map(|link| link.split(['?', '#']).next()).collect()
    };
    let (chapters, files) = (named("/guide/"), named("/static/"));
    assert!(chapters.len() > 5 && !files.is_empty(), "{chapters:?} {files:?}");
    let mut all = Vec::new();
    for (access, method, path) in route_access_table().rows() {
        let path = path
            .replace("{job}", "a")
            .replace("{id}", "1")
            .replace("{task}", "0")
            .replace("{host}", "h")
            .replace("{clique}", "00000000000000aa")
            .replace("{run}", "1");
        let path = path.replace("{*key}", "k");
        for filled in match path.as_str() {
            "/guide/{page}" => chapters.iter().map(|name| format!("/guide/{name}")).collect(),
            "/static/{file}" => files.iter().map(|name| format!("/static/{name}")).collect(),
            path => vec![path.to_owned()],
        } {
            assert!(!filled.contains('{'), "what stands for {filled}?");
            all.push(RouteOperation::new(access, method.as_str(), &filled));
        }
    }
    for path in ["/nothing", "/api/v1/nothing"] {
        all.push(RouteOperation::new(RequiredAccess::ADMIN, "POST", path));
    }
    all
}

fn valid_request_body(method: &str, path: &str) -> String {
    let value: Value = match (method, path) {
        ("GET" | "DELETE", _) => return String::new(),
        (_, "/api/v1/jobs") => json!({"name": "b", "settings": {"tasks": 1}, "reason": "why"}),
        (_, path) if path.ends_with("/exclusions") => json!({"task": 0, "reason": "why"}),
        (_, path) if path.ends_with("/stacks/answers") => {
            json!({"request": 1, "task": 0, "ticket": "0", "threads": []})
        }
        (_, path) if path.contains("/keys/") => json!({"text": "v", "reason": "why"}),
        _ => json!({"reason": "why"}),
    };
    value.to_string()
}

/// Sends a request with the headers that all requests have, and with these.
async fn send_operation(
    house: &InProcessHttpPort,
    operation: &RouteOperation,
    headers: &[(&str, &str)],
) -> crate::in_process_http_port::HttpPortResponse {
    let mut all = vec![("content-type", "application/json")];
    all.extend(headers);
    house.send(&operation.method, &operation.path, &all, &operation.body).await
}

#[tokio::test]
async fn unauthenticated_requests_reach_only_probes_and_login() {
    let house = InProcessHttpPort::requiring_tokens("stranger");
    let before = house.engine_state_bytes();
    for operation in operations_of_all_routes(&house).await {
        let answer = send_operation(&house, &operation, &[]).await;
        let place = format!("{} {}", operation.method, operation.path);
        if operation.public {
            assert_ne!(answer.status, StatusCode::UNAUTHORIZED, "{place}");
            continue;
        }
        assert_eq!(
            (answer.status, answer.problem_type().as_str()),
            (StatusCode::UNAUTHORIZED, "no-token"),
            "{place}"
        );
        assert_eq!(answer.headers["www-authenticate"], "Bearer realm=\"muster\"", "{place}");
        let wrong = send_operation(&house, &operation, &[("authorization", "Bearer muster_wrong")]).await;
        assert!(matches!(wrong.status.as_u16(), 401 | 429), "{place}: {wrong:?}");
    }
    assert_eq!(house.engine_state_bytes(), before);
}

#[tokio::test]
async fn every_change_asks_for_its_role() {
    let house = InProcessHttpPort::requiring_tokens("role");
    let (viewer, operator) =
        (house.authorization_header(AccessRole::Viewer), house.authorization_header(AccessRole::Operator));
    let mut for_admins = Vec::new();
    for operation in
        operations_of_all_routes(&house).await.iter().filter(|operation| operation.changes_state())
    {
        let place = format!("{} {}", operation.method, operation.path);
        // Every role that may read may log in and out, and lets a program answer for its task.
        if ["/login", "/logout"].contains(&operation.path.as_str()) || operation.is_report() {
            continue;
        }
        let before = house.engine_state_bytes();
        let answer = send_operation(&house, operation, &[("authorization", &viewer)]).await;
        assert_eq!(
            (answer.status, answer.problem_type().as_str()),
            (StatusCode::FORBIDDEN, "not-allowed"),
            "{place}"
        );
        assert_eq!(house.engine_state_bytes(), before, "{place}");
        let answer = send_operation(&house, operation, &[("authorization", &operator)]).await;
        if answer.problem_type() == "not-allowed" {
            for_admins.push(place);
        }
    }
    for_admins.sort();
    let expected = [
        "DELETE /api/v1/jobs/a?reason=why",
        "PATCH /api/v1/jobs/a",
        "POST /api/v1/jobs",
        // A change without a route is for admins.
        "POST /api/v1/nothing",
        "POST /nothing",
    ];
    assert_eq!(for_admins, expected);
    // Refusals are audited with the name of the token.
    let audit = house
        .send("GET", "/api/v1/audit?outcome=refused", &[("authorization", &viewer)], "")
        .await
        .body_as_json();
    assert!(
        audit["lines"].as_array().unwrap().iter().any(|line| line["actor"]["who"] == "a-viewer"),
        "{audit}"
    );
}

#[tokio::test]
async fn a_viewer_sees_everything_but_the_values_of_keys_and_to_look_changes_nothing() {
    let house = InProcessHttpPort::requiring_tokens("viewer");
    let (viewer, admin) =
        (house.authorization_header(AccessRole::Viewer), house.authorization_header(AccessRole::Admin));
    let put = json!({"text": "xyzzy-4711", "reason": "why"}).to_string();
    let headers = [("authorization", &*admin), ("content-type", "application/json")];
    assert!(house.send("PUT", "/api/v1/jobs/a/keys/k", &headers, &put).await.status.is_success());
    let before = house.engine_state_bytes();
    for operation in
        operations_of_all_routes(&house).await.iter().filter(|operation| !operation.changes_state())
    {
        let place = format!("{} {}", operation.method, operation.path);
        let answer = send_operation(&house, operation, &[("authorization", &viewer)]).await;
        let refused = operation.path.contains("/keys/");
        assert_eq!(answer.status == StatusCode::FORBIDDEN, refused, "{place}: {answer:?}");
        assert!(!answer.body.contains("xyzzy-4711"), "{place} shows the value of a key");
        assert_ne!(
            send_operation(&house, operation, &[("authorization", &admin)]).await.status,
            StatusCode::FORBIDDEN,
            "{place}"
        );
        assert_eq!(house.engine_state_bytes(), before, "{place} has changed something");
    }
}

#[tokio::test]
async fn no_page_elsewhere_changes_anything_whatever_it_knows() {
    for (name, closed) in [("foreign-closed", true), ("foreign-open", false)] {
        let house = if closed {
            InProcessHttpPort::requiring_tokens(name)
        } else {
            InProcessHttpPort::without_access_control(name)
        };
        let admin = house.authorization_header(AccessRole::Admin);
        let before = house.engine_state_bytes();
        for operation in
            operations_of_all_routes(&house).await.iter().filter(|operation| operation.changes_state())
        {
            let place = format!("{} {} ({name})", operation.method, operation.path);
            for marks in [
                [("origin", "https://evil.example"), ("accept", "*/*")],
                [("origin", "null"), ("accept", "*/*")],
                [("origin", "http://muster.example:8080"), ("accept", "*/*")],
                [("sec-fetch-site", "cross-site"), ("accept", "*/*")],
                [("sec-fetch-site", "same-site"), ("accept", "*/*")],
            ] {
                let [mark, accept] = marks;
                let answer =
                    send_operation(&house, operation, &[mark, accept, ("authorization", &admin)]).await;
                let found = (answer.status, answer.problem_type());
                assert_eq!(found, (StatusCode::FORBIDDEN, "foreign-origin".into()), "{place} {mark:?}");
            }
        }
        assert_eq!(house.engine_state_bytes(), before);
    }
}

#[tokio::test]
async fn dns_rebinding_is_refused() {
    for (name, closed) in [("host-closed", true), ("host-open", false)] {
        let house = if closed {
            InProcessHttpPort::requiring_tokens(name)
        } else {
            InProcessHttpPort::without_access_control(name)
        };
        let admin = house.authorization_header(AccessRole::Admin);
        let before = house.engine_state_bytes();
        for operation in operations_of_all_routes(&house).await {
            if operation.public && !operation.changes_state() {
                continue;
            }
            let answer = send_operation(
                &house,
                &operation,
                &[("host", "evil.example:8477"), ("authorization", &admin)],
            )
            .await;
            let place = format!("{} {} ({name})", operation.method, operation.path);
            assert_eq!(answer.status, StatusCode::MISDIRECTED_REQUEST, "{place}");
        }
        assert_eq!(house.engine_state_bytes(), before);
    }
}

#[tokio::test]
async fn a_browser_that_changes_something_shows_the_proof_of_its_page() {
    let house = InProcessHttpPort::requiring_tokens("proof");
    let (cookie, proof) = house.log_in(AccessRole::Admin).await;
    let before = house.engine_state_bytes();
    let own = ("origin", format!("http://{HOST}"));
    for operation in
        operations_of_all_routes(&house).await.iter().filter(|operation| operation.changes_state())
    {
        let place = format!("{} {}", operation.method, operation.path);
        for wrong in [None, Some(""), Some("x"), Some(&proof[1..])] {
            let mut headers = vec![("cookie", &*cookie), ("origin", &*own.1)];
            headers.extend(wrong.map(|wrong| ("x-csrf-token", wrong)));
            let answer = send_operation(&house, operation, &headers).await;
            let found = (answer.status, answer.problem_type());
            assert_eq!(found, (StatusCode::FORBIDDEN, "no-proof".into()), "{place} {wrong:?}");
        }
    }
    assert_eq!(house.engine_state_bytes(), before);
    let put = json!({"text": "v", "reason": "why"}).to_string();
    let headers = [
        ("cookie", &*cookie),
        ("x-csrf-token", &*proof),
        ("content-type", "application/json"),
        ("origin", &own.1),
    ];
    let answer = house.send("PUT", "/api/v1/jobs/a/keys/k", &headers, &put).await;
    assert!(answer.status.is_success(), "{answer:?}");
    let audit = house.send("GET", "/api/v1/audit", &[("cookie", &cookie)], "").await.body_as_json();
    let line = audit["lines"].as_array().unwrap().last().unwrap().clone();
    assert_eq!(
        (&line["actor"]["who"], &line["actor"]["means"]),
        (&json!("a-admin"), &json!("page")),
        "{audit}"
    );
}

#[tokio::test]
async fn without_tokens_browsers_still_need_csrf_proofs_and_tools_json() {
    let house = InProcessHttpPort::without_access_control("open");
    let before = house.engine_state_bytes();
    let all = operations_of_all_routes(&house).await;
    let own = format!("http://{HOST}");
    for operation in all.iter().filter(|operation| operation.changes_state()) {
        let place = format!("{} {}", operation.method, operation.path);
        for mark in [("origin", &*own), ("sec-fetch-site", "same-origin"), ("cookie", "muster-visit=x")] {
            let answer = send_operation(&house, operation, &[mark]).await;
            assert_eq!(answer.problem_type(), "no-proof", "{place} {mark:?}");
        }
        // A login is a form with a CSRF proof.
        if operation.method == "POST" && !operation.public {
            for kind in ["text/plain", crate::in_process_http_port::FORM, "multipart/form-data; boundary=x"] {
                let answer = send_operation(&house, operation, &[("content-type", kind)]).await;
                assert_eq!(answer.status, StatusCode::UNSUPPORTED_MEDIA_TYPE, "{place} {kind}");
                let missing =
                    if kind == crate::in_process_http_port::FORM { "header origin" } else { "must be JSON" };
                let detail = answer.body_as_json()["detail"].to_string();
                assert!(detail.contains(missing), "{place} {kind}: {detail}");
            }
        }
    }
    assert_eq!(house.engine_state_bytes(), before);
    let body = json!({"name": "b", "settings": {"tasks": 1}, "reason": "why"}).to_string();
    let made = house.send("POST", "/api/v1/jobs", &[("content-type", "application/json")], &body).await;
    assert_eq!(made.status, StatusCode::CREATED, "{made:?}");
}

#[tokio::test]
async fn every_answer_tells_browsers_what_not_to_do() {
    let house = InProcessHttpPort::requiring_tokens("headers");
    let admin = house.authorization_header(AccessRole::Admin);
    for operation in operations_of_all_routes(&house).await {
        for headers in [vec![], vec![("authorization", &*admin)]] {
            let answer = send_operation(&house, &operation, &headers).await;
            let place = format!("{} {}: {:?}", operation.method, operation.path, answer.headers);
            let policy = answer.headers["content-security-policy"].to_str().unwrap();
            assert!(policy.starts_with("default-src 'none'") && !policy.contains("unsafe"), "{place}");
            assert_eq!(answer.headers["x-content-type-options"], "nosniff", "{place}");
            assert_eq!(answer.headers["referrer-policy"], "same-origin", "{place}");
            assert_eq!(answer.headers["cross-origin-opener-policy"], "same-origin", "{place}");
            assert!(answer.headers.get("strict-transport-security").is_none(), "{place}");
            assert!(answer.headers.get("access-control-allow-origin").is_none(), "{place}");
        }
    }
    let secure = TransportSecurity { secure: true, certificate: None };
    let answer = house.send_over(secure, "GET", "/version", &[], "").await;
    assert!(answer.headers.contains_key("strict-transport-security"));
}
