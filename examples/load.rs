//! load: addr pid conns inflight seconds mode
use bytes::{BufMut, Bytes, BytesMut};
use muster::proto::xla::coordination as c;
use prost::Message;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

fn framed(m: &impl Message) -> Bytes {
    let mut b = BytesMut::new();
    b.put_u8(0);
    b.put_u32(m.encoded_len() as u32);
    m.encode(&mut b).unwrap();
    b.freeze()
}
fn cpu(pid: u32) -> f64 {
    let mut total = 0u64;
    for t in std::fs::read_dir(format!("/proc/{pid}/task")).unwrap() {
        let p = t.unwrap().path().join("schedstat");
        if let Ok(s) = std::fs::read_to_string(p) {
            total += s.split(' ').next().unwrap().parse::<u64>().unwrap_or(0);
        }
    }
    total as f64 / 1e9
}
fn rss(pid: u32) -> u64 {
    let s = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
    s.lines().find(|l| l.starts_with("VmRSS")).unwrap().split_whitespace().nth(1).unwrap().parse().unwrap()
}
type Send = h2::client::SendRequest<Bytes>;
async fn call(s: &mut Send, method: &str, body: Bytes, svc: &str) -> (u16, Option<String>, Vec<u8>) {
    let mut s = s.clone().ready().await.unwrap();
    let r = http::Request::post(format!("http://127.0.0.1:8476/{svc}/{method}"))
        .header("content-type", "application/grpc")
        .header("te", "trailers")
        .header("grpc-encoding", "gzip")
        .header("grpc-accept-encoding", "identity, deflate, gzip")
        .header("user-agent", "load")
        .header("grpc-timeout", "50S")
        .body(())
        .unwrap();
    let (resp, mut st) = s.send_request(r, false).unwrap();
    st.send_data(body, true).unwrap();
    let resp = resp.await.unwrap();
    let (head, mut b) = resp.into_parts();
    let mut out = vec![];
    while let Some(d) = b.data().await {
        let d = d.unwrap();
        let _ = b.flow_control().release_capacity(d.len());
        out.extend_from_slice(&d);
    }
    let t = b.trailers().await.unwrap().unwrap_or(head.headers);
    (
        t.get("grpc-status").map_or(999, |s| s.to_str().unwrap().parse().unwrap()),
        t.get("grpc-message").map(|m| m.to_str().unwrap().to_string()),
        out,
    )
}
const SVC: &str = "xla.coordination.CoordinationService";
fn main() {
    let a: Vec<String> = std::env::args().collect();
    let (addr, pid, conns, inflight, secs, mode) = (
        a[1].clone(),
        a[2].parse::<u32>().unwrap(),
        a[3].parse::<usize>().unwrap(),
        a[4].parse::<usize>().unwrap(),
        a[5].parse::<f64>().unwrap(),
        a[6].clone(),
    );
    let threads = std::env::var("THREADS").ok().and_then(|t| t.parse().ok()).unwrap_or(2);
    let rt =
        tokio::runtime::Builder::new_multi_thread().worker_threads(threads).enable_all().build().unwrap();
    rt.block_on(async move {
        let mut clients = vec![];
        for _ in 0..conns {
            let s = tokio::net::TcpStream::connect(&addr).await.unwrap();
            s.set_nodelay(true).unwrap();
            let (send, conn) = h2::client::Builder::new()
                .initial_window_size(4 << 20)
                .initial_connection_window_size(8 << 20)
                .max_frame_size(4 << 20)
                .handshake::<_, Bytes>(s)
                .await
                .unwrap();
            tokio::spawn(async move {
                let _ = conn.await;
            });
            clients.push(send);
        }
        println!("connected {conns}, rss {} KiB", rss(pid));
        let t = Instant::now();
        let c0 = cpu(pid);
        let mut regs = vec![];
        for (i, s) in clients.iter().enumerate() {
            let mut s = s.clone();
            regs.push(tokio::spawn(async move {
                let r = call(
                    &mut s,
                    "RegisterTask",
                    framed(&c::RegisterTaskRequest { incarnation: 77 + i as u64, source_task_id: i as i32 }),
                    SVC,
                )
                .await;
                if r.0 != 0 && r.0 != 999 {
                    println!("register {i}: {:?}", r);
                }
                c::RegisterTaskResponse::decode(&r.2[5..]).map(|r| r.service_incarnation).unwrap_or(0)
            }));
        }
        let mut inc = 0;
        for r in regs {
            inc = r.await.unwrap();
        }
        let service = inc;
        println!("registered in {:?}, cpu {:.0} us each", t.elapsed(), (cpu(pid) - c0) / conns as f64 * 1e6);
        let ids = |i: usize| {
            Some(c::Incarnations {
                task_id: 0,
                task_incarnation: 77 + i as u64,
                service_incarnation: service,
            })
        };
        let ops = Arc::new(AtomicU64::new(0));
        if mode == "idle" {
            for (i, s) in clients.iter().enumerate() {
                let (mut s1, mut s2) = (s.clone(), s.clone());
                let b1 = framed(&c::PollForErrorRequest { incarnations: ids(i), source_task_id: i as i32 });
                let b2 = framed(&c::GetKeyValueRequest {
                    incarnations: ids(i),
                    key: "RECEIVED_PREEMPTION_NOTICE".into(),
                });
                tokio::spawn(async move {
                    let r = call(&mut s1, "PollForError", b1, SVC).await;
                    println!("poll {r:?}");
                });
                tokio::spawn(async move {
                    let r = call(&mut s2, "GetKeyValue", b2, SVC).await;
                    println!("get {r:?}");
                });
            }
            tokio::time::sleep(Duration::from_secs_f64(secs)).await;
            println!("idle with two waiting calls each: rss {} KiB", rss(pid));
            std::process::exit(0);
        }
        if mode == "live" || mode == "barrier" {
            for round in 0..3 {
                let t = Instant::now();
                let c0 = cpu(pid);
                let mut all = vec![];
                let task_ids: Vec<i32> = (0..conns as i32).collect();
                for (i, s) in clients.iter().enumerate() {
                    let mut s = s.clone();
                    let (m, b) = if mode == "live" {
                        (
                            "GetAliveTasks",
                            framed(&c::GetAliveTasksRequest {
                                incarnations: ids(i),
                                requesting_task_id: i as i32,
                                task_ids: task_ids.clone(),
                            }),
                        )
                    } else {
                        (
                            "Barrier",
                            framed(&c::BarrierRequest {
                                incarnations: ids(i),
                                barrier_id: "b".into(),
                                barrier_timeout_in_ms: 60000,
                                task_ids: vec![],
                                source_task_id: i as i32,
                                counter: round,
                            }),
                        )
                    };
                    all.push(tokio::spawn(async move {
                        let r = call(&mut s, m, b, SVC).await;
                        if r.0 != 0 {
                            println!("{r:?}");
                        }
                    }));
                }
                for r in all {
                    r.await.unwrap();
                }
                println!("{mode} {:?}, cpu {:.1} us each", t.elapsed(), (cpu(pid) - c0) / conns as f64 * 1e6);
            }
            println!("rss {} KiB", rss(pid));
            std::process::exit(0);
        }
        let size: usize = std::env::var("SIZE").ok().and_then(|s| s.parse().ok()).unwrap_or(64);
        for (i, s) in clients.iter().enumerate() {
            for j in 0..inflight {
                let (mut s, ops, mode) = (s.clone(), ops.clone(), mode.clone());
                let hb = framed(&c::HeartbeatRequest {
                    incarnations: ids(i),
                    incarnation: 77 + i as u64,
                    source_task_id: i as i32,
                });
                let ins = framed(&c::InsertKeyValueRequest {
                    incarnations: ids(i),
                    kv: Some(c::KeyValueEntry { key: format!("k/{i}/{j}"), value: vec![1; size].into() }),
                    allow_overwrite: true,
                });
                tokio::spawn(async move {
                    loop {
                        let r = if mode == "insert" {
                            call(&mut s, "InsertKeyValue", ins.clone(), SVC).await
                        } else {
                            call(&mut s, "Heartbeat", hb.clone(), SVC).await
                        };
                        if r.0 != 0 {
                            println!("{r:?}");
                            return;
                        }
                        ops.fetch_add(1, Ordering::Relaxed);
                    }
                });
            }
        }
        tokio::time::sleep(Duration::from_millis(500)).await;
        let (o, t, c0) = (ops.load(Ordering::Relaxed), Instant::now(), cpu(pid));
        tokio::time::sleep(Duration::from_secs_f64(secs)).await;
        let n = ops.load(Ordering::Relaxed) - o;
        println!(
            "{mode}: {:.0}/s, server cpu {:.2} us each, rss {} KiB",
            n as f64 / t.elapsed().as_secs_f64(),
            (cpu(pid) - c0) / n as f64 * 1e6,
            rss(pid)
        );
        std::process::exit(0);
    });
}
