//! try
use muster::{clock::Clock, coordination::*, engine::Engine, grpc};
use std::time::Duration;
fn main() {
    let arg = |i: usize| std::env::args().nth(i);
    let n: u32 = arg(2).and_then(|a| a.parse().ok()).unwrap_or(2);
    let rec = arg(3).as_deref() == Some("recoverable");
    let hb: f64 = std::env::var("HB").ok().and_then(|a| a.parse().ok()).unwrap_or(100.0);
    let st: f64 = std::env::var("ST").ok().and_then(|a| a.parse().ok()).unwrap_or(300.0);
    let workers: usize = std::env::var("WORKERS").ok().and_then(|a| a.parse().ok()).unwrap_or(2);
    let filter = std::env::var("RUST_LOG").unwrap_or_else(|_| "info".into());
    tracing_subscriber::fmt().with_env_filter(filter).with_writer(std::io::stderr).init();
    let rt =
        tokio::runtime::Builder::new_multi_thread().worker_threads(workers).enable_all().build().unwrap();
    rt.block_on(async move {
        let engine = Engine::new(Clock::start());
        let mut s = JobSettings::new(n);
        s.recoverable = rec;
        s.heartbeat_timeout = Duration::from_secs_f64(hb);
        s.shutdown_timeout = Duration::from_secs_f64(st);
        engine.declare(JobName::default(), s).unwrap();
        tokio::spawn(std::sync::Arc::clone(&engine).run_timers());
        let server = grpc::Server::new(std::sync::Arc::clone(&engine), grpc::Limits::default());
        let l = grpc::bind(arg(1).unwrap_or("127.0.0.1:8476".into()).parse().unwrap()).unwrap();
        let (tx, rx) = tokio::sync::watch::channel(false);
        let serving = tokio::spawn(std::sync::Arc::clone(&server).serve(l, grpc::Routing::ByAuthority, rx));
        let e2 = std::sync::Arc::clone(&engine);
        if std::env::var("EVENTS").is_ok() {
            tokio::spawn(async move {
                let (kept, mut rx) = e2.follow(0);
                for k in kept {
                    eprintln!("{:?}", k);
                }
                while let Ok(k) = rx.recv().await {
                    eprintln!("{:?}", k);
                }
            });
        }
        tokio::signal::ctrl_c().await.unwrap();
        eprintln!("{:?}", server.figures());
        engine.stop();
        tx.send(true).unwrap();
        serving.await.unwrap();
        eprintln!("stopped {:?}", server.figures());
    });
}
