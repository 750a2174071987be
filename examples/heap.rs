#![allow(unsafe_code)]
//! try
use muster::{clock::Clock, coordination::*, engine::Engine, grpc};
use std::alloc::*;
use std::sync::atomic::{AtomicI64, Ordering::Relaxed};
struct A;
static LIVE: [AtomicI64; 40000] = [const { AtomicI64::new(0) }; 40000];
unsafe impl GlobalAlloc for A {
    unsafe fn alloc(&self, l: Layout) -> *mut u8 {
        LIVE[l.size().min(39999)].fetch_add(1, Relaxed);
        unsafe { System.alloc(l) }
    }
    unsafe fn dealloc(&self, p: *mut u8, l: Layout) {
        LIVE[l.size().min(39999)].fetch_sub(1, Relaxed);
        unsafe { System.dealloc(p, l) }
    }
}
#[global_allocator]
static G: A = A;
fn show(what: &str) {
    let mut all: Vec<(usize, i64)> = LIVE
        .iter()
        .enumerate()
        .map(|(s, n)| (s, n.load(Relaxed)))
        .filter(|(s, n)| *s as i64 * n > 500_000)
        .collect();
    all.sort_by_key(|(s, n)| -(*s as i64 * n));
    eprintln!(
        "{what}: total {} KB",
        LIVE.iter().enumerate().map(|(s, n)| s as i64 * n.load(Relaxed)).sum::<i64>() / 1000
    );
    for (s, n) in all.iter().take(40) {
        eprintln!("  {s} x {n} = {} KB", *s as i64 * n / 1000);
    }
}
fn main() {
    let n: u32 = std::env::args().nth(2).unwrap().parse().unwrap();
    let rt = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
    rt.block_on(async move {
        let engine = Engine::new(Clock::start());
        engine.declare(JobName::default(), JobSettings::new(n)).unwrap();
        tokio::spawn(std::sync::Arc::clone(&engine).run_timers());
        let server = grpc::Server::new(std::sync::Arc::clone(&engine), grpc::Limits::default());
        let l = grpc::bind(std::env::args().nth(1).unwrap().parse().unwrap()).unwrap();
        let (_tx, rx) = tokio::sync::watch::channel(false);
        tokio::spawn(std::sync::Arc::clone(&server).serve(l, grpc::Routing::ByAuthority, rx));
        let mut was = (0, 0);
        loop {
            tokio::time::sleep(std::time::Duration::from_millis(700)).await;
            let now = (server.figures().connections, server.figures().calls as usize);
            if now != was {
                eprintln!("{now:?}");
                was = now;
            } else if now.0 > 0 {
                show("steady");
                was = (0, 0);
                tokio::time::sleep(std::time::Duration::from_secs(2)).await;
            }
        }
    });
}
