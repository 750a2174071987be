//! The program of a process with one GPU. It registers as a task, publishes its device as JAX does, and does what the lines of
//! its standard input say, one after the other, as a program of JAX does: what waits holds up everything behind it.
//!
//! | line | what it does |
//! | --- | --- |
//! | `join CLIQUE RANKS` | makes a communicator with these tasks (`0,1,2`); the clique is a number |
//! | `call CLIQUE FUNCTION COUNT TIMES` | enqueues collectives |
//! | `sync CLIQUE` | waits until they have ended |
//! | `hold CLIQUE` | lets the GPU wait in the clique's stream |
//! | `pause MS` | does nothing for a while |
//! | `irregular SEED MS CLIQUES` | calls collectives of several cliques (`0,1`) at random, with pauses of random ranks |
//! | `time CLIQUE TIMES` | calls tiny collectives, waits for each, and says how long they took |
//! | `release` | lets the GPU go on; at once, whatever the program waits for |
//!
//! It answers each line with `done LINE`. The end of its standard input ends it.

use std::collections::BTreeMap;
use std::io::{BufRead as _, Write as _};
use std::path::Path;
use std::sync::mpsc;
use std::time::Duration;

use muster::agent::{Agent, AgentConfig};
use muster::proto::xla;
use prost::Message as _;
use tokio::runtime::Runtime;

use crate::harness::TestInstant;
use crate::simulated_nccl::{Communicator, Gpu, UNIQUE_ID_BYTES, release_streams};

/// The name of this program among the tests.
pub const NAME: &str = "rank_program::run_rank";
/// The variables that the test sets beside JAX's: the service of the job, the library of NCCL, the number of tasks.
pub const SERVICE_VARIABLE: &str = "TEST_SERVICE";
pub const LIBRARY_VARIABLE: &str = "TEST_NCCL_LIBRARY";
pub const TASKS_VARIABLE: &str = "TEST_TASKS";

/// The limit of a wait for another task.
const PEER_LIMIT: Duration = Duration::from_secs(60);
/// The longest pause of `irregular`: with the time between two reports, it is longer than the threshold of the tests, and alone
/// it is shorter, also on a loaded machine.
const PAUSE_MAX_MS: u64 = 1_300;
/// The largest count.
const COUNT_MAX: u64 = 4_096;

#[test]
#[ignore = "a process of another test"]
fn run_rank() {
    let (lines, queue) = mpsc::channel();
    std::thread::spawn(move || read_lines(&lines));
    let mut rank = Rank::start();
    answer("ready");
    while let Ok(line) = queue.recv() {
        rank.follow(&line);
        answer(&format!("done {line}"));
    }
}

fn read_lines(queue: &mpsc::Sender<String>) {
    for line in std::io::stdin().lock().lines().map_while(Result::ok) {
        if line == "release" {
            release_streams();
        } else if queue.send(line).is_err() {
            break;
        }
    }
    // The program may wait for a collective that never ends.
    std::process::exit(0);
}

fn answer(line: &str) {
    // The test reads no other line than a whole one.
    let mut out = std::io::stdout().lock();
    writeln!(out, "{line}").and_then(|()| out.flush()).expect("the test reads");
}

fn variable(name: &str) -> String {
    std::env::var(name).unwrap_or_else(|_| panic!("{name} is not set"))
}

/// The process: a task with one device.
struct Rank {
    task: u32,
    runtime: Runtime,
    agent: Agent,
    gpu: Gpu,
    cliques: BTreeMap<u32, Communicator>,
}

impl Rank {
    fn start() -> Self {
        let task = variable("JAX_PROCESS_ID").parse().expect("a number");
        let tasks = variable(TASKS_VARIABLE).parse().expect("a number");
        let gpu = Gpu::load(Path::new(&variable(LIBRARY_VARIABLE)));
        let runtime = Runtime::new().expect("a runtime");
        let config = AgentConfig {
            heartbeat_timeout: Duration::from_secs(5),
            patience: Duration::from_secs(300),
            ..AgentConfig::new(variable(SERVICE_VARIABLE), task)
        };
        let agent = runtime.block_on(async {
            let agent = Agent::join(config).await.expect("the service takes the task");
            publish_devices(&agent, task, tasks).await;
            agent
        });
        Self { task, runtime, agent, gpu, cliques: BTreeMap::new() }
    }

    fn follow(&mut self, line: &str) {
        let words: Vec<&str> = line.split(' ').collect();
        let number = |text: &str| text.parse::<u64>().expect("a number");
        let clique = |text: &str| self.cliques[&text.parse::<u32>().expect("the number of a clique")];
        match words[..] {
            ["join", name, tasks] => {
                let tasks: Vec<u32> = tasks.split(',').map(|task| task.parse().expect("a task")).collect();
                let name = name.parse().expect("the number of a clique");
                let communicator = self.join(name, &tasks);
                self.cliques.insert(name, communicator);
            }
            ["call", name, function, count, times] => {
                (0..number(times)).for_each(|_| clique(name).call(function, number(count) as usize));
            }
            ["sync", name] => clique(name).synchronize(),
            ["hold", name] => clique(name).hold(),
            ["pause", ms] => std::thread::sleep(Duration::from_millis(number(ms))),
            ["irregular", seed, ms, names] => {
                let cliques: Vec<Communicator> = names.split(',').map(clique).collect();
                self.be_irregular(number(seed), number(ms), &cliques);
            }
            ["time", name, times] => {
                let (began, clique) = (TestInstant::now(), clique(name));
                for _ in 0..number(times) {
                    clique.call("AllReduce", 1);
                    clique.synchronize();
                }
                answer(&format!("took {}", began.elapsed().as_micros()));
            }
            _ => panic!("there is no line {line:?}"),
        }
    }

    /// Makes a communicator as XLA does: the first task writes NCCL's unique id under a key that names the devices.
    fn join(&self, name: u32, tasks: &[u32]) -> Communicator {
        let [devices, incarnations] = [0, 1000].map(|first| {
            let numbers: Vec<String> = tasks.iter().map(|task| (first + task).to_string()).collect();
            numbers.join(",")
        });
        let root = tasks[0];
        let key = format!(
            "cuda:root_process: {root}; clique: devices=[{devices}]; communication_id={name}; \
             incarnations=[{incarnations}]"
        );
        let id: [u8; UNIQUE_ID_BYTES] = if self.task == root {
            let id = self.gpu.new_unique_id();
            self.runtime.block_on(self.agent.insert(&key, id.to_vec(), false)).expect("the key is new");
            id
        } else {
            let id = self.runtime.block_on(self.agent.get(&key, PEER_LIMIT)).expect("the root writes it");
            id.as_ref().try_into().expect("an id")
        };
        let rank = tasks.iter().position(|task| *task == self.task).expect("this task is one of them");
        self.gpu.join(id, tasks.len(), rank)
    }

    /// Calls collectives until the pauses have taken `ms` together. Every rank draws the same numbers, so their programs agree.
    fn be_irregular(&self, seed: u64, ms: u64, cliques: &[Communicator]) {
        let mut random = fastrand::Rng::with_seed(seed);
        let ranks = u64::from(variable(TASKS_VARIABLE).parse::<u32>().expect("a number"));
        let mut paused_ms = 0;
        while paused_ms < ms {
            let (late, pause_ms) = (random.u64(0..ranks), random.u64(0..=PAUSE_MAX_MS));
            let is_busy = random.u64(0..4) == 0;
            if is_busy || u64::from(self.task) == late {
                std::thread::sleep(Duration::from_millis(pause_ms));
            }
            paused_ms += pause_ms;
            for _ in 0..random.u64(1..20) {
                let clique = cliques[random.usize(0..cliques.len())];
                let function = ["AllReduce", "ReduceScatter", "AllGather", "Broadcast"][random.usize(0..4)];
                let count = random.u64(1..=COUNT_MAX) as usize;
                clique.call(function, count);
                if random.u64(0..4) == 0 {
                    clique.synchronize();
                }
            }
            // No rank falls behind by more than one pause.
            cliques.iter().for_each(Communicator::synchronize);
        }
    }
}

/// Publishes the device of this task, and waits until those of all tasks are published, as JAX does for GPUs: device `n` is that
/// of task `n`.
async fn publish_devices(agent: &Agent, task: u32, tasks: u32) {
    let key = |task: u32| format!("cuda:local_topology/cuda/{task}");
    let topology = |task: u32| xla::LocalTopologyProto {
        process_id: task as i32,
        boot_id: format!("boot-{task}"),
        devices: vec![xla::DeviceProto {
            global_device_id: task as i32,
            device_kind: "Simulated GPU".to_owned(),
            ..xla::DeviceProto::default()
        }],
        ..xla::LocalTopologyProto::default()
    };
    agent.insert(&key(task), topology(task).encode_to_vec(), false).await.expect("the key is new");
    let global_key = "cuda:global_topology/cuda";
    if task == 0 {
        let mut processes = Vec::new();
        for task in 0..tasks {
            let value = agent.get(&key(task), PEER_LIMIT).await.expect("every task publishes its device");
            processes.push(xla::LocalTopologyProto::decode(value).expect("a topology"));
        }
        let global = xla::GlobalTopologyProto { processes }.encode_to_vec();
        agent.insert(global_key, global, false).await.expect("the key is new");
    }
    agent.get(global_key, PEER_LIMIT).await.expect("task 0 publishes all devices");
}
