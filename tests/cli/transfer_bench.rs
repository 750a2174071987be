//! `muster transfer bench` and `muster doctor`, on the machine that runs the tests.

use std::collections::BTreeMap;

use serde_json::Value;
use simulated_gpu::SimulatedGpu;

use crate::fabric_provider::fabric_over_tcp;
use crate::harness::{Process, Signal, TempFolder, is_alive, muster, run, signal, wait_until};

/// Returns the lines of a short benchmark.
fn bench_json_lines(arguments: &[&str]) -> Vec<Value> {
    let quick = ["transfer", "bench", "--json", "--seconds", "0.01", "--repeat", "2"];
    let ended = run(&mut muster(quick.iter().chain(arguments)));
    assert_eq!((ended.code, ended.err.as_str()), (Some(0), ""), "{}", ended.out);
    ended.out.lines().map(|line| serde_json::from_str(line).expect("every line is JSON")).collect()
}

fn child_process_ids(pid: i32) -> Vec<i32> {
    let list = std::fs::read_to_string(format!("/proc/{pid}/task/{pid}/children")).unwrap_or_default();
    list.split_whitespace().map(|pid| pid.parse().expect("process ids are numbers")).collect()
}

#[test]
fn a_benchmark_says_for_each_size_what_was_moved_and_that_it_was_right() {
    for transport in ["shm", "pvm", "unix", "tcp"] {
        let bench_json_lines = bench_json_lines(&["--transport", transport, "--size", "1B,3KiB,100KiB"]);
        let sizes: Vec<_> =
            bench_json_lines.iter().map(|line| line["size_bytes"].as_u64().unwrap()).collect();
        assert_eq!(sizes, [1, 3072, 102_400], "{transport}");
        for line in &bench_json_lines {
            assert_eq!(
                (&line["verified"], &line["asked"]),
                (&Value::Bool(true), &transport.into()),
                "{line}"
            );
            assert_eq!(line["repetitions"], 2);
            let number = |name: &str| line[name].as_f64().unwrap_or_else(|| panic!("no {name} in {line}"));
            assert!(number("gbytes_per_second") > 0.0);
            assert!(0.0 < number("p50_us") && number("p50_us") <= number("p99_us"));
            assert!(0.0 < number("half_round_trip_p50_us") && 0.0 < number("cpu_us"));
            assert!(0.0 < number("prepare_p50_us") && number("prepare_p50_us") <= number("prepare_first_us"));
            let spread = &line["spread"]["gbytes_per_second"];
            assert!(spread["min"].as_f64() <= spread["median"].as_f64(), "{spread}");
            assert!(spread["median"].as_f64() <= spread["max"].as_f64(), "{spread}");
        }
        // At least the large buffers use the requested transport.
        assert_eq!(bench_json_lines[2]["transport"], transport);
        // Transports within a host have no checksums, although they are on by default.
        assert_eq!(bench_json_lines[2]["checksums"], Value::Bool(transport == "tcp"), "{transport}");
    }
}

#[test]
fn memory_is_read_over_a_fabric() {
    let lines = bench_json_lines(&["--transport", "tcp", "--fabric", fabric_over_tcp(), "--size", "1MiB"]);
    assert_eq!((&lines[0]["verified"], &lines[0]["transport"]), (&Value::Bool(true), &"fabric".into()));
    let unknown = run(&mut muster(["transfer", "bench", "--transport", "tcp", "--fabric", "carrier-pigeon"]));
    assert!(unknown.code != Some(0) && unknown.err.contains("carrier-pigeon"), "{unknown:?}");
}

#[test]
fn transfers_that_are_not_prepared_are_measured_too() {
    for transport in ["shm", "pvm", "tcp"] {
        let bench_json_lines = bench_json_lines(&[
            "--transport",
            transport,
            "--unprepared",
            "--size",
            "3KiB,1MiB",
            "--batch",
            "2",
        ]);
        assert_eq!(bench_json_lines.len(), 2);
        for line in &bench_json_lines {
            assert_eq!((&line["unprepared"], &line["verified"]), (&true.into(), &true.into()), "{line}");
            assert!(line["gbytes_per_second"].as_f64() > Some(0.0) && line["p50_us"].as_f64() > Some(0.0));
        }
        assert_eq!(bench_json_lines[1]["transport"], transport);
    }
    assert_eq!(bench_json_lines(&["--size", "3KiB"])[0]["unprepared"], Value::Bool(false));
}

#[test]
fn tcp_is_measured_under_tls_too() {
    let folder = TempFolder::new("bench-tls");
    let certificates = folder.path("certs");
    muster::tls::certificate_authority::write_trial_certificates(
        certificates.as_ref(),
        &["engines".to_owned()],
    )
    .expect("certificates can be made");
    let [cert, key, ca] =
        ["server", "server-key", "ca"].map(|name| folder.path(&format!("certs/{name}.pem")));
    let files = ["--transfer-cert", &cert, "--transfer-key", &key, "--transfer-ca", &ca];
    let bench_json_lines =
        bench_json_lines(&[&["--transport", "tcp", "--size", "3KiB,1MiB"][..], &files].concat());
    assert_eq!(bench_json_lines.len(), 2);
    for line in bench_json_lines {
        assert_eq!((&line["verified"], &line["transport"]), (&Value::Bool(true), &"tcp".into()), "{line}");
    }
}

#[test]
fn batches_pairs_lanes_and_checksums_are_as_asked() {
    let asked = [
        "--transport",
        "tcp",
        "--size",
        "4KiB",
        "--batch",
        "100",
        "--pairs",
        "2",
        "--lanes",
        "3",
        "--checksums",
        "off",
    ];
    let bench_json_lines = bench_json_lines(&asked);
    let line = &bench_json_lines[0];
    assert_eq!((&line["batch"], &line["pairs"], &line["lanes"]), (&100.into(), &2.into(), &3.into()));
    assert_eq!((&line["checksums"], &line["verified"]), (&false.into(), &true.into()));
}

#[test]
fn latency_alone_moves_nothing_else() {
    for spin in ["0s", "1ms"] {
        let bench_json_lines = bench_json_lines(&["--size", "4KiB", "--latency", "--spin", spin]);
        assert_eq!(
            (&bench_json_lines[0]["gbytes_per_second"], &bench_json_lines[0]["verified"]),
            (&Value::Null, &true.into())
        );
        assert!(bench_json_lines[0]["p50_us"].as_f64() > Some(0.0));
        let by = bench_json_lines[0]["transport"].as_str().unwrap();
        assert!(["shm", "pvm", "unix", "tcp"].contains(&by), "{}", bench_json_lines[0]);
    }
}

#[test]
fn a_benchmark_reports_a_dead_task_and_leaves_no_process() {
    let mut bench = Process::start(&mut muster(["transfer", "bench", "--seconds", "600"]));
    let mut tasks = Vec::new();
    wait_until("the benchmark measures", || {
        tasks = child_process_ids(bench.pid());
        tasks.len() == 2
    });
    bench.out_line("prepare: first");
    signal(tasks[0], Signal::KILL);
    let ended = bench.end();
    assert_eq!(ended.code, Some(1));
    let named = format!("task 0 of the benchmark (sender, process {}) has ended", tasks[0]);
    assert!(ended.err.contains(&named), "{}", ended.err);
    wait_until("the other one is gone", || !is_alive(tasks[1]));
}

#[test]
fn a_benchmark_whose_task_is_stopped_says_which_and_ends() {
    let quick = ["transfer", "bench", "--seconds", "0.05", "--repeat", "1000", "--grace", "1s"];
    let mut bench = Process::start(&mut muster(quick));
    bench.out_line("prepare: first");
    let tasks = child_process_ids(bench.pid());
    signal(tasks[1], Signal::STOP);
    let ended = bench.end();
    assert_eq!(ended.code, Some(1));
    let named = format!("task 1 of the benchmark (receiver, process {}): it is stopped", tasks[1]);
    for part in ["no answer within", "asked to", &named, "measure again"] {
        assert!(ended.err.contains(part), "{part:?} is not in {}", ended.err);
    }
    wait_until("both are gone", || tasks.iter().all(|task| !is_alive(*task)));
}

#[test]
fn buffers_in_the_memory_of_simulated_gpus_are_measured() {
    let folder = TempFolder::new("bench-gpu");
    SimulatedGpu::link_into(folder.0.as_ref()).unwrap();
    let quick = ["transfer", "bench", "--json", "--seconds", "0.01", "--repeat", "1", "--memory", "gpu"];
    for transport in ["auto", "tcp"] {
        let asked = ["--transport", transport, "--size", "1B,9KiB,1MiB"];
        let mut command = muster(quick.iter().chain(&asked));
        command.env("LD_LIBRARY_PATH", &folder.0).env("SIMULATED_GPU", "devices=2");
        let ended = run(&mut command);
        assert_eq!((ended.code, ended.err.as_str()), (Some(0), ""), "{}", ended.out);
        let lines: Vec<Value> = ended.out.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
        assert_eq!(lines.len(), 3);
        for line in lines {
            assert_eq!((&line["verified"], &line["memory"]), (&Value::Bool(true), &"gpu".into()), "{line}");
            // The GPU of the receiving process copies from the memory of the sending one, except the bytes of a small launch.
            if transport == "auto" && line["size_bytes"] == 1 << 20 {
                assert_eq!(line["transport"], "gpu", "{line}");
            }
        }
    }
    let together = run(&mut muster(["transfer", "bench", "--memory", "gpu", "--unprepared"]));
    assert!(together.code == Some(1) && together.err.contains("leave out --memory gpu"), "{together:?}");
}

#[test]
fn without_a_driver_the_benchmark_says_so_and_the_doctor_too() {
    let folder = TempFolder::new("no-gpu");
    for name in ["libcuda.so", "libcuda.so.1"] {
        std::fs::write(folder.path(name), "no library").unwrap();
    }
    let mut command = muster(["transfer", "bench", "--memory", "gpu"]);
    let ended = run(command.env("LD_LIBRARY_PATH", &folder.0));
    assert_eq!(ended.code, Some(1));
    assert!(ended.err.contains("there is no CUDA driver"), "{}", ended.err);
    let checked = run(muster(["doctor", "--json"]).env("LD_LIBRARY_PATH", &folder.0));
    let checks: Vec<Value> = serde_json::from_str(&checked.out).unwrap();
    let gpu = checks.iter().find(|check| check["id"] == "gpu_memory").unwrap();
    assert_eq!(gpu["state"], "missing", "{gpu}");
}

#[test]
fn the_doctor_describes_simulated_gpus() {
    let folder = TempFolder::new("doctor-gpu");
    SimulatedGpu::link_into(folder.0.as_ref()).unwrap();
    let mut command = muster(["doctor", "--json"]);
    command.env("LD_LIBRARY_PATH", &folder.0).env("SIMULATED_GPU", "devices=2;memory=4G");
    let checks: Vec<Value> = serde_json::from_str(&run(&mut command).out).unwrap();
    let gpu = checks.iter().find(|check| check["id"] == "gpu_memory").unwrap();
    let found = gpu["found"].as_str().unwrap();
    assert!(gpu["state"] == "good" && found.matches("(4.0 GiB)").count() == 2, "{gpu}");
}

#[test]
fn the_doctor_tells_what_is_wrong_with_a_simulated_gpu() {
    let folder = TempFolder::new("doctor-sick-gpu");
    SimulatedGpu::link_into(folder.0.as_ref()).unwrap();
    let checks = |settings: &str| -> BTreeMap<String, Value> {
        let mut command = muster(["doctor", "--json"]);
        command.env("LD_LIBRARY_PATH", &folder.0).env("SIMULATED_GPU", settings);
        let checks: Vec<Value> = serde_json::from_str(&run(&mut command).out).unwrap();
        checks.into_iter().map(|check| (check["id"].as_str().unwrap().to_owned(), check)).collect()
    };
    let healthy = checks("devices=2");
    for id in ["gpu_reached", "gpu_ecc", "gpu_persistence", "gpu_clocks", "gpu_pcie", "gpu_nvlink"] {
        assert_eq!(healthy[id]["state"], "good", "{}", healthy[id]);
    }
    for id in ["gpu_page_locked", "gpu_peer_access"] {
        assert_eq!(healthy[id]["state"], "good", "{}", healthy[id]);
    }
    let sick = checks(
        "devices=2;peer_access=0;nvml_uncorrected=2;nvml_persistence=0;nvml_clock_reasons=64;nvml_pcie_width=8;nvml_links_down=1",
    );
    for (id, found) in [
        ("gpu_ecc", "GPU 0: up to 2 errors"),
        ("gpu_persistence", "GPUs 0, 1: persistence mode is off"),
        ("gpu_clocks", "GPU 0: so hot that the hardware slows it"),
        ("gpu_pcie", "GPU 0: 8 of 16 lanes"),
        ("gpu_nvlink", "down (GPU.link): 0.0"),
        ("gpu_peer_access", "2 of 2 pairs cannot"),
    ] {
        let check = &sick[id];
        assert!(check["found"].as_str().unwrap().contains(found) && check["fix"].is_string(), "{check}");
    }
    let lost = &checks("devices=2;nvml_lost=1")["gpu_reached"];
    assert!(lost["state"] == "missing" && lost["found"].as_str().unwrap().starts_with("GPU 0: "), "{lost}");
}

#[test]
fn sizes_that_make_no_sense_are_refused() {
    for wrong in
        [&["--size", "0"][..], &["--size", "5GiB"], &["--size", "4KB"], &["--size", "1GiB", "--batch", "64"]]
    {
        let ended = run(&mut muster(["transfer", "bench"].iter().chain(wrong)));
        assert!(ended.code.is_some_and(|code| code != 0) && ended.out.is_empty(), "{wrong:?}: {ended:?}");
    }
}

#[test]
fn the_doctor_finds_nccl_on_the_loader_path() {
    let folder = TempFolder::new("doctor-nccl");
    let library = folder.path("libnccl.so.2.99.0");
    std::fs::write(&library, "").unwrap();
    let ended = run(muster(["doctor", "--json"]).env("LD_LIBRARY_PATH", &folder.0));
    let checks: Vec<Value> = serde_json::from_str(&ended.out).unwrap();
    let nccl = checks.iter().find(|check| check["id"] == "nccl").unwrap();
    let found = format!("2.99.0, {}", library);
    assert_eq!((&nccl["state"], &nccl["found"]), (&"good".into(), &found.into()));
}

#[test]
fn the_doctor_examines_this_machine() {
    let ended = run(&mut muster(["doctor", "--json"]));
    assert_eq!((ended.code, ended.err.as_str()), (Some(0), ""));
    let checks: Vec<Value> = serde_json::from_str(&ended.out).unwrap();
    let by_id: BTreeMap<_, _> = checks.iter().map(|check| (check["id"].as_str().unwrap(), check)).collect();
    assert_eq!(by_id.len(), checks.len());
    for check in &checks {
        assert!(
            ["good", "could_be_better", "missing"].contains(&check["state"].as_str().unwrap()),
            "{check}"
        );
        assert!(!check["why"].as_str().unwrap().is_empty() && !check["found"].as_str().unwrap().is_empty());
        let next = check["fix"].is_string() || check["nothing_to_do"].is_string();
        assert_eq!(
            next,
            check["state"] != "good",
            "what is not good has a fix, or why there is none: {check}"
        );
    }
    // Two of its processes really moved bytes over shared memory, which the tests of the engine need as well.
    assert_eq!(by_id["shared_memory"]["state"], "good", "{}", by_id["shared_memory"]);
    assert_eq!(by_id["memory_file"]["state"], "good");
    let cores = std::thread::available_parallelism().unwrap().get();
    if by_id["cpu_quota"]["state"] == "good" {
        assert!(by_id["cores"]["found"].as_str().unwrap().starts_with(&cores.to_string()));
    }
    let text = run(&mut muster(["doctor", "--brief"]));
    assert_eq!(text.code, Some(0));
    let last = text.out.lines().last().unwrap();
    let good = checks.iter().filter(|check| check["state"] == "good").count();
    assert!(last.starts_with(&format!("{good} good, ")), "{last}");
    assert!(!text.out.lines().any(|line| line.starts_with("good")), "{}", text.out);
}
