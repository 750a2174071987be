//! Clients of the coordination service, for tests whose tasks do more than register.

use std::cell::Cell;

use muster::proto::xla::coordination as wire;
use tonic::transport::{Channel, Endpoint};
use wire::coordination_service_client::CoordinationServiceClient;

use crate::harness::MusterServer;

/// The clients of a server; their connections last as long as this value.
pub struct Clients {
    runtime: tokio::runtime::Runtime,
    channel: Channel,
    /// The service incarnation of the run, after registration.
    service: Cell<u64>,
    /// The number of registrations.
    lives: Cell<u64>,
}

impl Clients {
    pub fn connect_to(server: &MusterServer) -> Self {
        let runtime = tokio::runtime::Runtime::new().expect("a runtime");
        let endpoint = Endpoint::from_shared(format!("http://{}", server.grpc)).expect("an address");
        let channel = runtime.block_on(endpoint.connect()).expect("it connects");
        Self { runtime, channel, service: Cell::default(), lives: Cell::default() }
    }

    /// Sets the service incarnation to that of another process's run.
    pub fn set_service_incarnation(&self, run: u64) {
        self.service.set(run);
    }

    fn incarnation_of(&self, task: i32) -> u64 {
        1000 * self.lives.get() + 100 + task as u64
    }

    /// Returns the incarnations with which the present life of a task calls.
    fn incarnations_of(&self, task: i32) -> Option<wire::Incarnations> {
        Some(wire::Incarnations {
            task_id: 0,
            task_incarnation: self.incarnation_of(task),
            service_incarnation: self.service.get(),
        })
    }

    fn client(&self) -> CoordinationServiceClient<Channel> {
        CoordinationServiceClient::new(self.channel.clone())
    }

    /// Registers this many tasks.
    pub fn register(&self, tasks: i32) {
        self.lives.set(self.lives.get() + 1);
        let all: Vec<_> = (0..tasks)
            .map(|task| {
                let mut client = self.client();
                let request = wire::RegisterTaskRequest {
                    incarnation: self.incarnation_of(task),
                    source_task_id: task,
                };
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
        let request =
            wire::InsertKeyValueRequest { incarnations: self.incarnations_of(0), kv, allow_overwrite: true };
        self.runtime.block_on(self.client().insert_key_value(request)).expect("it is written");
    }

    /// Starts to wait for a key that is never written.
    pub fn wait_for_key(&self, key: &str) {
        let mut client = self.client();
        let request = wire::GetKeyValueRequest { incarnations: self.incarnations_of(0), key: key.into() };
        self.runtime.spawn(async move { client.get_key_value(request).await });
    }

    /// Arrives at a barrier and ignores the result.
    pub fn wait_at_barrier(&self, task: i32, id: &str, timeout_ms: i64) {
        let mut client = self.client();
        let request = wire::BarrierRequest {
            incarnations: self.incarnations_of(task),
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
            incarnations: self.incarnations_of(task),
            source_task_id: task,
            error_code: 13,
            error_message: message.into(),
        };
        self.runtime.block_on(self.client().report_error_to_service(request)).expect("it is reported");
    }
}
