//! Clients of the coordination service, for tests that need tasks which do more than register.

use std::cell::Cell;

use muster::proto::xla::coordination as wire;
use tonic::transport::{Channel, Endpoint};
use wire::coordination_service_client::CoordinationServiceClient;

use crate::web::Server;

/// The clients of a server, which speak for as long as this lives.
pub struct Clients {
    runtime: tokio::runtime::Runtime,
    channel: Channel,
    /// That of the run, once they are registered.
    service: Cell<u64>,
    /// How often they have registered.
    lives: Cell<u64>,
}

impl Clients {
    pub fn of(server: &Server) -> Self {
        let runtime = tokio::runtime::Runtime::new().expect("a runtime");
        let endpoint = Endpoint::from_shared(format!("http://{}", server.grpc)).expect("an address");
        let channel = runtime.block_on(endpoint.connect()).expect("it connects");
        Self { runtime, channel, service: Cell::default(), lives: Cell::default() }
    }

    /// They speak in the run of another process.
    pub fn belong_to(&self, run: u64) {
        self.service.set(run);
    }

    fn life(&self, task: i32) -> u64 {
        1000 * self.lives.get() + 100 + task as u64
    }

    /// Which life of a task speaks.
    fn claim(&self, task: i32) -> Option<wire::Incarnations> {
        Some(wire::Incarnations {
            task_id: 0,
            task_incarnation: self.life(task),
            service_incarnation: self.service.get(),
        })
    }

    fn client(&self) -> CoordinationServiceClient<Channel> {
        CoordinationServiceClient::new(self.channel.clone())
    }

    /// Registers so many tasks.
    pub fn register(&self, tasks: i32) {
        self.lives.set(self.lives.get() + 1);
        let all: Vec<_> = (0..tasks)
            .map(|task| {
                let mut client = self.client();
                let request =
                    wire::RegisterTaskRequest { incarnation: self.life(task), source_task_id: task };
                self.runtime.spawn(async move { client.register_task(request).await })
            })
            .collect();
        for done in all {
            let answer = self.runtime.block_on(done).expect("it runs").expect("it is registered");
            self.service.set(answer.into_inner().service_incarnation);
        }
    }

    /// Writes a key.
    pub fn insert(&self, key: &str, value: impl Into<bytes::Bytes>) {
        let kv = Some(wire::KeyValueEntry { key: key.into(), value: value.into() });
        let request = wire::InsertKeyValueRequest { incarnations: self.claim(0), kv, allow_overwrite: true };
        self.runtime.block_on(self.client().insert_key_value(request)).expect("it is written");
    }

    /// Waits for a key that nobody writes.
    pub fn wait_for_key(&self, key: &str) {
        let mut client = self.client();
        let request = wire::GetKeyValueRequest { incarnations: self.claim(0), key: key.into() };
        self.runtime.spawn(async move { client.get_key_value(request).await });
    }

    /// Comes to a barrier, whatever comes of it.
    pub fn wait_at_barrier(&self, task: i32, id: &str, timeout_ms: i64) {
        let mut client = self.client();
        let request = wire::BarrierRequest {
            incarnations: self.claim(task),
            barrier_id: id.into(),
            barrier_timeout_in_ms: timeout_ms,
            task_ids: Vec::new(),
            source_task_id: task,
            counter: 0,
        };
        self.runtime.spawn(async move { client.barrier(request).await });
    }

    /// Reports an error of a task.
    pub fn fail(&self, task: i32, message: &str) {
        let request = wire::ReportErrorToServiceRequest {
            incarnations: self.claim(task),
            source_task_id: task,
            error_code: 13,
            error_message: message.into(),
        };
        self.runtime.block_on(self.client().report_error_to_service(request)).expect("it is reported");
    }
}
