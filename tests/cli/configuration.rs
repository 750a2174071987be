//! Tests of the sources of configuration values, and of the errors for invalid values.

use std::path::PathBuf;

use crate::harness::{CommandOutput, muster, run};

fn write_config_file(name: &str, text: &str) -> PathBuf {
    let path = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join(format!("{name}.toml"));
    std::fs::write(&path, text).expect("the file can be written");
    path
}

/// Returns the printed line of `key` in `table`.
fn printed_setting_line<'a>(printed: &'a CommandOutput, table: &str, key: &str) -> &'a str {
    let text = match table {
        "" => printed.out.as_str(),
        table => printed.out.split_once(&format!("[{table}]\n")).expect("the table is printed").1,
    };
    text.lines().find(|line| line.starts_with(&format!("{key} = "))).expect("the key is printed")
}

#[test]
fn every_value_is_printed_with_its_source() {
    let path = write_config_file(
        "sources",
        "log = 'debug'\nhttp = '127.0.0.1:9002'\nheartbeat-timeout = '7s'\n[jobs.a]\ntasks = 3\n",
    );
    let printed = run(muster(["config", "print", "--grpc", "127.0.0.1:9000", "--config"])
        .arg(&path)
        .env("MUSTER_GRPC", "127.0.0.1:9001")
        .env("MUSTER_HTTP", "127.0.0.1:9003"));
    assert_eq!((printed.code, printed.err.as_str()), (Some(0), ""));
    let shown =
        |table, key| printed_setting_line(&printed, table, key).split_once("  # ").expect("it has a source");
    let value = |table, key: &'static str| {
        let (value, source) = shown(table, key);
        (value.trim_end().to_owned(), source.to_owned())
    };
    let at = |n: u32| format!("{}:{n}", path.display());
    assert_eq!(value("", "grpc"), ("grpc = \"127.0.0.1:9000\"".into(), "flag --grpc".into()));
    assert_eq!(value("", "http"), ("http = \"127.0.0.1:9003\"".into(), "environment MUSTER_HTTP".into()));
    assert_eq!(value("", "log"), ("log = \"debug\"".into(), at(1)));
    assert_eq!(value("", "stop-timeout"), ("stop-timeout = \"10s\"".into(), "default".into()));
    assert_eq!(value("jobs.a", "tasks"), ("tasks = 3".into(), at(5)));
    assert_eq!(value("jobs.a", "heartbeat-timeout"), ("heartbeat-timeout = \"7s\"".into(), at(3)));
}

#[test]
fn config_print_writes_a_file_that_reads_back_the_same() {
    let first =
        run(&mut muster(["config", "print", "--job", "b=4@127.0.0.1:9100", "--disconnect-grace", "off"]));
    let path = write_config_file("again", &first.out);
    let second = run(muster(["config", "print", "--config"]).arg(&path));
    let values = |printed: &CommandOutput| -> Vec<String> {
        let value = |line: &str| line.split("  # ").next().unwrap_or_default().trim_end().to_owned();
        printed.out.lines().map(value).collect()
    };
    assert_eq!(values(&first), values(&second));
    let checked = run(muster(["serve", "--check-config", "--config"]).arg(&path));
    assert_eq!(
        (checked.code, checked.out.trim()),
        (Some(0), "The configuration is valid: 1 job(s), 4 task(s).")
    );
}

#[test]
fn nonsense_is_named_with_its_place_and_a_way_out() {
    let cases: [(&str, &str, &[&str]); 9] = [
        (
            "unknown",
            "[jobs.a]\ntasks = 1\nhearbeat-timeout = '5s'",
            &["unknown.toml:3", "did you mean `heartbeat-timeout`"],
        ),
        ("no-tasks", "[jobs.a]\ntasks = 0", &["no-tasks.toml:2", "at least one task"]),
        ("many-tasks", "tasks = 1_000_001", &["many-tasks.toml:1", "at most 1000000"]),
        ("no-heartbeat", "tasks = 1\nheartbeat-timeout = '0s'", &["no-heartbeat.toml:2", "longer than zero"]),
        ("no-unit", "tasks = 1\nheartbeat-timeout = 100", &["no-unit.toml:2", "no unit", "5s"]),
        ("twice", "tasks = 1\n[jobs.default]\ntasks = 2", &["`default`", "twice.toml:1", "another name"]),
        ("address", "tasks = 1\nhttp = '127.0.0.1:8476'", &["address.toml:2", "grpc", "another port"]),
        ("toml", "tasks = ", &["toml.toml:1", "not TOML"]),
        ("none", "log = 'info'", &["no job is declared", "--tasks"]),
    ];
    for (name, text, said) in cases {
        let ended = run(muster(["serve", "--check-config", "--config"]).arg(write_config_file(name, text)));
        assert_eq!(ended.code, Some(2), "{name}: {ended:?}");
        for part in said {
            assert!(ended.err.contains(part), "{name}: {part:?} is not in {:?}", ended.err);
        }
    }
    let ended = run(&mut muster(["serve", "--check-config", "--job", "a=1", "--job", "a=2"]));
    assert!(ended.code == Some(2) && ended.err.contains("--job"), "{ended:?}");
    let ended = run(&mut muster(["serve", "--check-config", "--config", "/nowhere/muster.toml"]));
    assert!(ended.code == Some(2) && ended.err.contains("cannot read"), "{ended:?}");
}

#[test]
fn the_help_names_every_flag_with_its_variable() {
    let help = run(&mut muster(["serve", "--help"]));
    for name in ["grpc", "heartbeat-timeout", "disconnect-grace", "log-format", "io-threads"] {
        assert!(help.out.contains(&format!("--{name}")), "{name}");
        let variable = format!("MUSTER_{}", name.to_uppercase().replace('-', "_"));
        assert!(help.out.contains(&variable), "{variable}");
    }
    assert!(help.out.contains("Examples:"));
}
