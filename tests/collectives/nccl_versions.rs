//! The plug-in with every table of NCCL's profiler, and with real NCCL libraries.

use std::collections::BTreeSet;
use std::process::Command;

use serde_json::json;

use crate::gpu_job::{GpuJob, JobSetup};
use crate::harness::{TestInstant, run, run_ignored_test};
use crate::libraries::{Libraries, target_folder};
use crate::skip::{Lacking, skip};

/// Runs a short story on an NCCL of this version: collectives are counted and timed, and a late task is named.
#[track_caller]
fn run_version(version: u32) {
    let nccl: &'static str = Box::leak(format!("nccl_version={version};nccl_channels=3").into_boxed_str());
    let setup = JobSetup { tasks: 2, timing: Some("always"), nccl, ..JobSetup::default() };
    let mut job = GpuJob::start_joined(&version.to_string(), &setup);
    job.wait_for_count(3);
    for function in ["AllGather", "ReduceScatter", "Broadcast"] {
        job.run(&[0, 1], &format!("call 0 {function} 500 20"));
    }
    job.run(&[0, 1], "sync 0");
    let view = job.wait_for_count(63);
    let functions = view["cliques"][0]["functions"].as_array().expect("functions");
    let told: BTreeSet<_> = functions
        .iter()
        .map(|row| {
            (row["function"].as_str().unwrap_or_default(), row["operations"].as_u64(), row["bytes"].as_u64())
        })
        .collect();
    let expected = [
        ("AllReduce", Some(3), Some(3 * 400)),
        ("AllGather", Some(20), Some(20 * 2000)),
        ("ReduceScatter", Some(20), Some(20 * 2000)),
        ("Broadcast", Some(20), Some(20 * 2000)),
    ];
    assert_eq!(told, BTreeSet::from(expected), "{view}");
    assert!(functions.iter().all(|row| row["gpu_s"].as_f64().is_some_and(|time| time > 0.0)), "{view}");
    assert!(functions.iter().all(|row| row["bus_bytes_per_s"].is_f64()), "{view}");
    let began = TestInstant::now();
    job.run(&[0], "call 0 AllReduce 7 1");
    let finding = job.wait_for_stuck(began);
    assert_eq!(finding["tasks"], json!([1]), "{finding}");
    job.run(&[1], "call 0 AllReduce 7 1");
    job.run(&[0, 1], "sync 0");
    job.wait_for_end_of_stuck();
}

#[test]
fn nccl_2_27_with_table_4() {
    run_version(22_707);
}

#[test]
fn nccl_2_28_with_table_5() {
    run_version(22_809);
}

#[test]
fn nccl_2_30_with_table_6() {
    run_version(23_007);
}

#[test]
fn nccl_2_32_with_table_7() {
    run_version(23_200);
}

/// The tables that the plug-in exports.
const TABLES: [&str; 7] = [
    "ncclProfiler_v1",
    "ncclProfiler_v2",
    "ncclProfiler_v3",
    "ncclProfiler_v4",
    "ncclProfiler_v5",
    "ncclProfiler_v6",
    "ncclProfiler_v7",
];

#[test]
fn the_plug_in_exports_nothing_but_its_tables() {
    let plugin = Libraries::find().plugin;
    let done = run(Command::new("nm").args(["--dynamic", "--defined-only"]).arg(&plugin));
    assert!(done.status.success(), "{done:?}");
    // Another symbol could take the place of one of the program, or the reverse.
    let exported: Vec<&str> = done.out.lines().filter_map(|line| line.split_whitespace().nth(2)).collect();
    assert_eq!(exported, TABLES, "{}", done.out);
}

#[test]
fn the_plug_in_loads_as_nccl_loads_it_and_stays() {
    run_ignored_test("nccl_versions::load_and_unload");
}

#[test]
#[ignore = "a process of another test"]
#[expect(unsafe_code, reason = "loads a library as NCCL does")]
fn load_and_unload() {
    use std::ffi::{CStr, CString, c_char};

    let plugin = Libraries::find().plugin;
    let path = CString::new(plugin.as_os_str().as_encoded_bytes()).unwrap();
    // SAFETY: the tables begin with their name and have 48 bytes.
    unsafe {
        let library = libc::dlopen(path.as_ptr(), libc::RTLD_NOW | libc::RTLD_LOCAL);
        assert!(!library.is_null(), "{:?}", CStr::from_ptr(libc::dlerror()));
        let mut addresses = Vec::new();
        for table in TABLES {
            let name = CString::new(table).unwrap();
            let address = libc::dlsym(library, name.as_ptr());
            assert!(!address.is_null(), "there is no {table}");
            assert_eq!(CStr::from_ptr(*address.cast::<*const c_char>()), c"muster");
            addresses.push(address as usize);
        }
        addresses.sort_unstable();
        assert!(addresses.windows(2).all(|two| two[1] - two[0] >= 48), "no table overlaps another");
        assert_eq!(libc::dlclose(library), 0);
    }
    // Its thread may still run code of it.
    let maps = std::fs::read_to_string("/proc/self/maps").expect("the maps of this process");
    assert!(maps.contains(plugin.to_str().expect("a text")), "the library was unloaded");
}

/// Releases of the real NCCL that `tests/run` installs into `target/nccl`, and the newest table that each looks for.
const RELEASES: [(&str, usize); 2] = [("2.27.7", 4), ("2.32.3", 7)];

#[test]
fn the_real_nccl_looks_for_tables_that_the_plug_in_has() {
    // Without a GPU, no communicator starts, and NCCL loads no plug-in. But its library has the names that it looks up.
    for (release, newest) in RELEASES {
        let library = target_folder().join("nccl").join(release).join("nvidia/nccl/lib/libnccl.so.2");
        if !library.is_file() {
            skip(Lacking::Installation("nvidia-nccl-cu12 in target/nccl"));
            return;
        }
        let search = ["-a", "-o", "-w", "-E", "ncclProfiler_v[0-9]+|NCCL_PROFILER_PLUGIN"];
        let done = run(Command::new("grep").args(search).arg(&library));
        let names: BTreeSet<&str> = done.out.lines().collect();
        let expected = TABLES[..newest].iter().copied().chain(["NCCL_PROFILER_PLUGIN"]).collect();
        assert_eq!(names, expected, "{release}");
    }
}
