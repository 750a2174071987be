//! Reads from the memory of another process, which is killed.

use std::io::{BufRead as _, BufReader, Write as _};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use muster_fabric::RemoteBytes;

use crate::memory::{Memory, open, random_bytes, read};

const MIB: usize = 1 << 20;
/// In the environment of the process that owns the memory.
const OWNER: &str = "MUSTER_FABRIC_OWNER";

/// Not a test of its own: the process that owns the memory.
#[test]
fn owner() {
    if std::env::var_os(OWNER).is_none() {
        return;
    }
    let fabric = open();
    let endpoint = fabric.open_endpoint().unwrap();
    let source = Memory::new(&fabric, random_bytes(5, 64 * MIB));
    let RemoteBytes { key, address } = source.remote(0);
    println!("owner: {key} {address} {}", hex(&endpoint.address().unwrap()));
    let mut line = String::new();
    std::io::stdin().read_line(&mut line).unwrap();
    endpoint.connect(&bytes_of(line.trim())).unwrap();
    std::thread::sleep(Duration::from_secs(120));
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

fn bytes_of(hex: &str) -> Vec<u8> {
    (0..hex.len() / 2).map(|at| u8::from_str_radix(&hex[2 * at..2 * at + 2], 16).unwrap()).collect()
}

/// The owner's process, which is killed when it is dropped.
struct Owner(Child);

impl Drop for Owner {
    fn drop(&mut self) {
        let _gone = self.0.kill();
        let _reaped = self.0.wait();
    }
}

#[test]
fn the_memory_of_another_process_is_read_until_it_is_killed() {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["--exact", "processes::owner", "--nocapture"]).env(OWNER, "1");
    let child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
    let mut owner = Owner(child);
    let mut lines = BufReader::new(owner.0.stdout.take().unwrap()).lines().map_while(Result::ok);
    let said = lines.find_map(|line| line.split_once("owner: ").map(|(_, said)| said.to_owned())).unwrap();
    let words: Vec<&str> = said.split(' ').collect();
    let from = |offset: usize| RemoteBytes {
        key: words[0].parse().unwrap(),
        address: words[1].parse::<u64>().unwrap() + offset as u64,
    };
    let fabric = open();
    let endpoint = fabric.open_endpoint().unwrap();
    endpoint.connect(&bytes_of(words[2])).unwrap();
    writeln!(owner.0.stdin.take().unwrap(), "{}", hex(&endpoint.address().unwrap())).unwrap();
    let wanted = random_bytes(5, 64 * MIB);
    let mut target = Memory::new(&fabric, vec![0; 64 * MIB]);
    let told: Vec<_> =
        (0..64).map(|n| read(&endpoint, &mut target, n * MIB..(n + 1) * MIB, from(n * MIB))).collect();
    for told in &told {
        told.recv_timeout(Duration::from_secs(30)).unwrap().unwrap();
    }
    assert!(target.bytes[..] == wanted[..]);
    // Killed with reads under way: each ends, with an error by itself, or when the endpoint is closed.
    let told: Vec<_> =
        (0..64).map(|n| read(&endpoint, &mut target, n * MIB..(n + 1) * MIB, from(n * MIB))).collect();
    told[3].recv_timeout(Duration::from_secs(30)).unwrap().unwrap();
    drop(owner);
    let began = Instant::now();
    let by_itself = told.iter().filter(|told| told.recv_timeout(Duration::from_millis(200)).is_ok()).count();
    assert!(endpoint.close());
    println!("{by_itself} of 64 reads ended by themselves; closed after {:?}", began.elapsed());
    drop(endpoint);
    // Nothing was told twice, and all senders are gone.
    assert!(told.iter().all(|told| told.try_iter().count() <= 1));
}
