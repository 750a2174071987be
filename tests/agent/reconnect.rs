//! Tests that healthy workers wait: for a stopped worker until the service finds it lost, and for an unreachable
//! service until it answers again.

use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::Duration;

use crate::harness::{MusterServer, Process, Signal, muster};
use crate::worker::{start_worker_at, worker};

/// Quick steps, in a job with a short heartbeat timeout.
const STEPPING: [&str; 8] = [
    "--program",
    "exercise",
    "--pause=20ms",
    "--bytes-max=100000",
    "--step-timeout",
    "1s",
    "--heartbeat-timeout",
    "6s",
];

fn end_worker(worker: Process) -> String {
    worker.signal(Signal::TERM);
    let ended = worker.end();
    assert_eq!(ended.code, Some(0), "{ended:?}");
    assert!(ended.out.contains("0 fault(s)"), "{ended:?}");
    ended.err
}

#[test]
fn healthy_workers_wait_for_a_stopped_one_until_the_service_finds_it_lost() {
    let server = MusterServer::start(&["--tasks", "3", "--recoverable", "--heartbeat-timeout", "6s"]);
    let mut workers: Vec<_> = (0..3).map(|task| worker(&server, task, &STEPPING)).collect();
    for worker in &mut workers {
        worker.out_line(": tasks 0 1 2;");
    }
    let stopped = workers.pop().expect("there are three");
    stopped.signal(Signal::STOP);
    for worker in &mut workers {
        worker.err_line("waits for task 2;");
        worker.out_line(": tasks 0 1;");
    }
    for worker in workers {
        let err = end_worker(worker);
        assert!(err.matches("waits for").count() <= 1, "once is enough: {err}");
    }
    stopped.signal(Signal::CONT);
    let ended = stopped.end();
    assert_eq!(ended.code, Some(1), "{ended:?}");
    assert!(ended.err.contains("heartbeat"), "it is told why it does not count any more: {ended:?}");
}

#[test]
fn workers_wait_for_a_service_that_is_stopped_for_a_while() {
    let server = MusterServer::start(&["--tasks", "2", "--recoverable", "--heartbeat-timeout", "2s"]);
    let quick = [&STEPPING[..7], &["1s"]].concat();
    let mut workers: Vec<_> = (0..2).map(|task| worker(&server, task, &quick)).collect();
    workers[1].out_line(": tasks 0 1;");
    server.signal(Signal::STOP);
    for worker in &mut workers {
        worker.err_line("waits for the service");
    }
    server.signal(Signal::CONT);
    for mut worker in workers {
        worker.err_line("the service answers again");
        worker.out_line(": tasks 0 1;");
        end_worker(worker);
    }
}

/// A proxy to the service that can be cut.
struct CuttableProxy {
    address: String,
    through: Arc<Mutex<Option<Vec<TcpStream>>>>,
}

impl CuttableProxy {
    fn start_for(service: SocketAddr) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").expect("there are free ports");
        let address = listener.local_addr().expect("it is bound").to_string();
        let through = Arc::new(Mutex::new(Some(Vec::new())));
        let open = Arc::clone(&through);
        thread::spawn(move || {
            for near in listener.incoming().map_while(Result::ok) {
                let mut open = open.lock().unwrap();
                // The proxy is cut: connections are refused.
                let Some(open) = open.as_mut() else { continue };
                let Ok(far) = TcpStream::connect(service) else { continue };
                for (from, to) in [(&near, &far), (&far, &near)] {
                    let (mut from, mut to) = (from.try_clone().unwrap(), to.try_clone().unwrap());
                    thread::spawn(move || {
                        let _ = std::io::copy(&mut from, &mut to);
                        let _ = to.shutdown(Shutdown::Both);
                    });
                }
                open.extend([near, far]);
            }
        });
        Self { address, through }
    }

    fn cut(&self) {
        for stream in self.through.lock().unwrap().take().into_iter().flatten() {
            let _ = stream.shutdown(Shutdown::Both);
        }
    }

    fn restore(&self) {
        *self.through.lock().unwrap() = Some(Vec::new());
    }
}

#[test]
fn a_worker_whose_way_to_the_service_is_cut_steps_on_when_it_is_mended() {
    let server = MusterServer::start(&["--tasks", "2", "--recoverable", "--disconnect-grace", "30s"]);
    let way = CuttableProxy::start_for(server.grpc);
    let mut near = worker(&server, 0, &STEPPING);
    let mut far = start_worker_at(&way.address, 1, &STEPPING);
    far.out_line(": tasks 0 1;");
    way.cut();
    far.err_line("waits for the service");
    // Longer than a step may take.
    thread::sleep(Duration::from_secs(2));
    way.restore();
    far.err_line("the service answers again");
    for worker in [&mut near, &mut far] {
        worker.out_line(": tasks 0 1;");
    }
    end_worker(near);
    end_worker(far);
}

#[test]
fn workers_of_a_restarted_service_are_asked_to_register_again() {
    let server = MusterServer::start(&["--tasks", "2", "--recoverable", "--heartbeat-timeout", "6s"]);
    let mut workers: Vec<_> = (0..2).map(|task| worker(&server, task, &STEPPING)).collect();
    workers[1].out_line(": tasks 0 1;");
    server.signal(Signal::KILL);
    for worker in &mut workers {
        worker.err_line("waits for the service");
    }
    let grpc = server.grpc.to_string();
    let again = ["serve", "--grpc", &grpc, "--http", "127.0.0.1:0", "--tasks", "2", "--recoverable"];
    let _again = MusterServer::run(&mut muster(again));
    for worker in workers {
        let ended = worker.end();
        assert_eq!(ended.code, Some(1), "{ended:?}");
        assert!(ended.err.contains("register again"), "{ended:?}");
    }
}
