//! Tests of which configurations a server starts with or refuses, and of its messages.

use crate::harness::{muster, run};

#[test]
fn addresses_beyond_this_machine_need_credentials_or_a_word() {
    let start = |arguments: &[&str]| {
        let all = ["serve", "--tasks", "1", "--check-config"];
        let ended = run(muster(all).args(arguments));
        (ended.code, ended.err)
    };
    let (code, error) = start(&["--http", "0.0.0.0:0"]);
    assert_eq!(code, Some(2), "{error}");
    for advice in ["muster token new", "--http-tls-client-ca", "127.0.0.1", "--insecure"] {
        assert!(error.contains(advice), "{error}");
    }
    let (code, error) = start(&["--grpc", "0.0.0.0:0"]);
    assert_eq!(code, Some(2), "{error}");
    assert!(error.contains("--grpc-tls-client-ca") && error.contains("--insecure-grpc"), "{error}");
    assert_eq!(start(&["--grpc", "0.0.0.0:0", "--insecure-grpc"]).0, Some(0));
    assert_eq!(start(&["--http", "0.0.0.0:0", "--insecure"]).0, Some(0));
    let (code, error) = start(&["--http", "0.0.0.0:0", "--tokens-file", "/nowhere"]);
    assert!(code == Some(1) && error.contains("/nowhere"), "{error}");
}
