//! Tests on real sockets that a request with an ambiguous host name is refused.

use std::io::Write as _;

use crate::service::{connect, read_response_status, start_service};

#[test]
fn a_host_that_could_be_read_in_two_ways_is_refused() {
    let service = start_service(&[]);
    let own = service.http.to_string();
    let ask = |target: &str, hosts: &[&str]| {
        let mut stream = connect(service.http);
        let hosts: String = hosts.iter().map(|host| format!("host: {host}\r\n")).collect();
        write!(stream, "GET {target} HTTP/1.1\r\n{hosts}connection: close\r\n\r\n").unwrap();
        read_response_status(&mut stream)
    };
    for path in ["/api/v1/jobs", "/healthz/ready"] {
        let absolute = |host: &str| format!("http://{host}{path}");
        assert_eq!(ask(path, &[&own]), 200);
        assert_eq!(ask(&absolute(&own), &[&own]), 200);
        assert_eq!(ask(&absolute("localhost"), &["LOCALHOST"]), 200);
        for wrong in [
            &["localhost:19001@evil"][..],
            &["localhost@evil"],
            &["localhost", "evil.example"],
            &["localhost", "localhost"],
            &["localhost, evil.example"],
            &["localhost:99999"],
            &["localhost/evil"],
        ] {
            assert_eq!(ask(path, wrong), 400, "{path} {wrong:?}");
        }
        for (target, host) in [
            (absolute("evil.example"), "localhost"),
            (absolute("localhost"), "evil.example"),
            (absolute("user@localhost"), "localhost"),
        ] {
            assert_eq!(ask(&target, &[host]), 400, "{target} {host}");
        }
    }
    assert_eq!(ask("/api/v1/jobs", &["evil.example"]), 421);
    assert_eq!(ask("/api/v1/jobs", &[]), 421, "without a name nothing is shown");
    assert_eq!(ask("/healthz/ready", &[]), 200, "probes may be of the old kind");
}
