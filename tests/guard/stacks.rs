//! Tests of stacks by REST: who may ask, answer and read; hostile helpers; and the page.

use http::StatusCode;
use muster::service::AccessRole;
use serde_json::{Value, json};

use crate::in_process_http_port::{FORM, HOST, HttpPortResponse, InProcessHttpPort, csrf_proof_in_page};

const STACKS: &str = "/api/v1/jobs/a/stacks";
const JSON: (&str, &str) = ("content-type", "application/json");

async fn post(house: &InProcessHttpPort, role: AccessRole, path: &str, body: &str) -> HttpPortResponse {
    let token = house.authorization_header(role);
    house.send("POST", path, &[JSON, ("authorization", &token)], body).await
}

async fn get(house: &InProcessHttpPort, path: &str) -> HttpPortResponse {
    let token = house.authorization_header(AccessRole::Viewer);
    house.send("GET", path, &[("authorization", &token), ("accept", "*/*")], "").await
}

/// Returns the request that a helper of a task gets.
async fn handed_request(house: &InProcessHttpPort, task: u32) -> Value {
    let answer = get(house, &format!("{STACKS}/requests?task={task}")).await;
    assert_eq!(answer.status, StatusCode::OK, "{answer:?}");
    answer.body_as_json()["request"].clone()
}

fn answer_body(request: &Value, task: i64, function: &str) -> Value {
    let frames = json!([{"function": function, "file": "/u/train.py", "line": 3}]);
    let thread = json!({"name": "MainThread", "main": true, "frames": frames});
    json!({"request": request["number"], "ticket": request["ticket"], "task": task, "threads": [thread]})
}

#[tokio::test]
async fn an_operator_asks_and_programs_answer_as_viewers() {
    let house = InProcessHttpPort::requiring_tokens("stacks-roles");
    assert_eq!(handed_request(&house, 0).await, Value::Null);
    let ask = json!({"tasks": "0", "reason": "it hangs"}).to_string();
    assert_eq!(post(&house, AccessRole::Viewer, STACKS, &ask).await.status, StatusCode::FORBIDDEN);
    let asked = post(&house, AccessRole::Operator, STACKS, &ask).await;
    assert_eq!(asked.status, StatusCode::ACCEPTED, "{asked:?}");
    let view = asked.body_as_json();
    assert_eq!(view["awaited"], json!([{"first": 0, "last": 0}]), "{view}");
    assert_eq!(handed_request(&house, 1).await, Value::Null, "task 1 is not asked");
    let request = handed_request(&house, 0).await;
    let answer = answer_body(&request, 0, "load_batch").to_string();
    let taken = post(&house, AccessRole::Viewer, &format!("{STACKS}/answers"), &answer).await;
    assert_eq!(taken.status, StatusCode::NO_CONTENT, "{taken:?}");
    let view = get(&house, STACKS).await.body_as_json();
    assert_eq!(view["groups"][0]["frames"][0]["function"], "load_batch", "{view}");
    assert_eq!(view["request"]["actor"]["who"], "a-operator", "{view}");
    let audit = get(&house, "/api/v1/audit").await.body_as_json();
    let acts: Vec<&str> =
        audit["lines"].as_array().unwrap().iter().filter_map(|line| line["act"].as_str()).collect();
    assert_eq!(acts, ["change", "ask-for-stacks"], "the refusal, and the request: {audit}");
}

#[tokio::test]
async fn wrong_answers_are_refused_with_their_problems() {
    let house = InProcessHttpPort::requiring_tokens("stacks-wrong");
    let answers = format!("{STACKS}/answers");
    let none = json!({"number": 1, "ticket": "0"});
    let answer = |request: &Value, task| answer_body(request, task, "f").to_string();
    let refused = post(&house, AccessRole::Viewer, &answers, &answer(&none, 0)).await;
    assert_eq!((refused.status.as_u16(), &*refused.problem_type()), (404, "no-such-stack-request"));
    let ask = json!({"tasks": "0", "reason": "it hangs"}).to_string();
    assert_eq!(post(&house, AccessRole::Operator, STACKS, &ask).await.status, StatusCode::ACCEPTED);
    let again = post(&house, AccessRole::Operator, STACKS, &ask).await;
    assert_eq!((again.status.as_u16(), &*again.problem_type()), (429, "too-soon"));
    let request = handed_request(&house, 0).await;
    let large = "x".repeat(300 << 10);
    let many: Vec<Value> = (0..300).map(|_| json!({"name": "t", "frames": []})).collect();
    let deep: Vec<Value> = (0..200).map(|_| json!({"function": "f"})).collect();
    let with_threads = |threads: Value| {
        let mut body = answer_body(&request, 0, "f");
        body["threads"] = threads;
        body.to_string()
    };
    for (body, status, kind) in [
        (answer(&none, 0), 409, "wrong-ticket"),
        (answer(&request, 1), 409, "not-asked"),
        (answer(&request, 7), 404, "no-such-task"),
        (answer(&request, -1), 404, "no-such-task"),
        (answer_body(&request, 0, &large).to_string(), 413, "bad-body"),
        (with_threads(many.into()), 422, "unusable"),
        (with_threads(json!([{"name": "t", "frames": deep}])), 422, "unusable"),
        (with_threads(json!([{"name": "t", "frames": [], "locals": {"key": "secret"}}])), 422, "bad-body"),
        ("{\"request\": 1, \"ticket\": \"\\udc80\"}".to_owned(), 400, "bad-body"),
        ("[".repeat(100_000), 422, "bad-body"),
    ] {
        let refused = post(&house, AccessRole::Viewer, &answers, &body).await;
        let found = (refused.status.as_u16(), refused.problem_type());
        assert_eq!(found, (status, kind.to_owned()), "{}", &body[..body.len().min(200)]);
    }
    let not_text = house
        .send_with_body(
            muster::http::TransportSecurity::default(),
            "POST",
            &answers,
            &[JSON, ("authorization", &house.authorization_header(AccessRole::Viewer))],
            axum::body::Body::from(vec![0xff, 0xfe, b'{']),
        )
        .await;
    assert_eq!(not_text.status, StatusCode::BAD_REQUEST);
    let taken = post(&house, AccessRole::Viewer, &answers, &answer(&request, 0)).await;
    assert_eq!(taken.status, StatusCode::NO_CONTENT, "{taken:?}");
    let twice = post(&house, AccessRole::Viewer, &answers, &answer(&request, 0)).await;
    assert_eq!((twice.status.as_u16(), &*twice.problem_type()), (409, "already-answered"));
    for (tasks, status) in [("5", 422), ("x", 422), ("", 422), ("2-1", 422)] {
        let body = json!({"tasks": tasks, "reason": "why"}).to_string();
        assert_eq!(
            post(&house, AccessRole::Operator, STACKS, &body).await.status.as_u16(),
            status,
            "{tasks}"
        );
    }
    let missing = get(&house, "/api/v1/jobs/b/stacks/requests?task=0").await;
    assert_eq!((missing.status.as_u16(), &*missing.problem_type()), (404, "no-such-job"));
    // Refused reports of programs leave no lines in the audit, except for bodies that were not read.
    let audit = get(&house, "/api/v1/audit").await.body_as_json();
    let lines = audit["lines"].as_array().unwrap().iter();
    let by_viewer: Vec<&Value> = lines.filter(|line| line["actor"]["who"] == "a-viewer").collect();
    let [line] = &by_viewer[..] else { panic!("{audit}") };
    assert!(line["detail"].as_str().unwrap().starts_with("the body has more than"), "{audit}");
}

#[tokio::test]
async fn reports_do_not_use_up_the_rate_of_changes() {
    let house = InProcessHttpPort::with_change_rate_limit_of("stacks-rate", 1);
    let body = answer_body(&json!({"number": 1, "ticket": "0"}), 0, "f").to_string();
    for _ in 0..20 {
        let answer = post(&house, AccessRole::Operator, &format!("{STACKS}/answers"), &body).await;
        assert_eq!(answer.status, StatusCode::NOT_FOUND, "{answer:?}");
    }
    let ask = json!({"reason": "why"}).to_string();
    assert_eq!(post(&house, AccessRole::Operator, STACKS, &ask).await.status, StatusCode::ACCEPTED);
}

#[tokio::test]
async fn the_page_asks_and_shows_hostile_names_as_text() {
    let house = InProcessHttpPort::requiring_tokens("stacks-page");
    let (cookie, _) = house.log_in(AccessRole::Operator).await;
    let own = format!("http://{HOST}");
    let page = house.send("GET", "/jobs/a/stacks", &[("cookie", &cookie), ("accept", "text/html")], "").await;
    assert!(
        page.body.contains("No stacks have been requested") && page.body.contains("/helper.py"),
        "{page:?}"
    );
    let form = format!("csrf={}&tasks=0-1&reason=it+hangs", csrf_proof_in_page(&page));
    let headers = [("content-type", FORM), ("cookie", &*cookie), ("origin", &*own)];
    let asked = house.send("POST", "/jobs/a/stacks", &headers, &form).await;
    // A request has the number of its line in the audit, of which the first one is the log-in.
    assert_eq!(
        (asked.status, &asked.headers["location"]),
        (StatusCode::SEE_OTHER, &"/jobs/a/stacks?asked=2".parse().unwrap())
    );
    let wrong = form.replace("tasks=0-1", "tasks=0-9");
    let refused = house.send("POST", "/jobs/a/stacks", &headers, &wrong).await;
    assert_eq!(refused.status, StatusCode::UNPROCESSABLE_ENTITY);
    assert!(
        refused.body.contains("there is no task 9") && refused.body.contains("value=\"0-9\""),
        "{refused:?}"
    );
    let request = handed_request(&house, 0).await;
    let hostile = "<script>alert(1)</script>\u{1b}[2J\u{202e}\n\"'&";
    let answer = answer_body(&request, 0, hostile).to_string();
    let taken = post(&house, AccessRole::Viewer, &format!("{STACKS}/answers"), &answer).await;
    assert_eq!(taken.status, StatusCode::NO_CONTENT, "{taken:?}");
    for path in ["/jobs/a/stacks", "/jobs/a/barriers", "/jobs/a"] {
        let page = house.send("GET", path, &[("cookie", &cookie), ("accept", "text/html")], "").await;
        assert_eq!(page.status, StatusCode::OK, "{path}");
        assert!(
            !page.body.contains("<script>alert") && !page.body.contains(['\u{1b}', '\u{202e}']),
            "{path}"
        );
        let shown = page.body.contains("&#60;script&#62;alert(1)");
        assert!(shown || path == "/jobs/a", "{path}: {}", page.body);
    }
    let viewer = house.log_in(AccessRole::Viewer).await.0;
    let page = house.send("GET", "/jobs/a/stacks", &[("cookie", &viewer), ("accept", "text/html")], "").await;
    assert!(page.body.contains("requires the <i>operator</i> role") && page.body.contains("&#60;script"));
}

#[tokio::test]
async fn the_helper_is_served_to_everybody_for_names_of_this_server_only() {
    let house = InProcessHttpPort::requiring_tokens("stacks-helper");
    let served = house.send("GET", "/helper.py?job=a", &[], "").await;
    assert_eq!(served.status, StatusCode::OK);
    let last = served.body.lines().last().unwrap();
    assert_eq!(last, format!("show_stacks(\"http://{HOST}\", job=\"a\")"));
    assert_eq!(served.headers["cache-control"], "no-store");
    let foreign = house.send("GET", "/helper.py", &[("host", "evil.example")], "").await;
    assert_eq!((foreign.status, &*foreign.problem_type()), (StatusCode::MISDIRECTED_REQUEST, "wrong-host"));
    for job in ["a%22%29%0aevil(", "%00", "a'b", &"x".repeat(300)] {
        let refused = house.send("GET", &format!("/helper.py?job={job}"), &[], "").await;
        assert_eq!(refused.status, StatusCode::BAD_REQUEST, "{job}: {}", refused.body);
    }
    let secure = muster::http::TransportSecurity { secure: true, certificate: None };
    let served = house.send_over(secure, "GET", "/helper.py", &[], "").await;
    assert!(served.body.ends_with(&format!("show_stacks(\"https://{HOST}\")\n")), "{}", served.body);
}
