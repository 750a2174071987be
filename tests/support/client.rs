//! A client of the service: one connection that makes calls for any task, in either generation of the protocol.

use std::net::SocketAddr;
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use tokio::sync::watch;
use tokio::task::JoinHandle;
use tonic::transport::{Channel, Endpoint};

use super::answer::Answer;
use super::call::{Call, Caller, Generation};
use super::{generation_a, generation_c};

/// One connection to a service.
#[derive(Clone)]
pub struct Client {
    generation: Generation,
    channel: Channel,
}

impl Client {
    /// Returns a client with a connection of its own, which the first call opens.
    pub fn new(generation: Generation, service: SocketAddr) -> Self {
        Self::to_authority(generation, service, None)
    }

    /// Returns a client that sends `authority` instead of the address that it dials.
    pub fn to_authority(generation: Generation, service: SocketAddr, authority: Option<&str>) -> Self {
        let mut endpoint = Endpoint::from_shared(format!("http://{service}")).expect("an address is a URI");
        if let Some(authority) = authority {
            endpoint = endpoint.origin(format!("http://{authority}").parse().expect("a valid authority"));
        }
        let endpoint = endpoint.connect_timeout(Duration::from_secs(10)).tcp_nodelay(true);
        Self { generation, channel: endpoint.connect_lazy() }
    }

    /// Returns the generation of the client.
    pub fn generation(&self) -> Generation {
        self.generation
    }

    /// Returns the channel, for calls outside of the protocol.
    pub fn channel(&self) -> Channel {
        self.channel.clone()
    }

    /// Makes a call and waits for its answer without a timeout.
    pub async fn ask(&self, caller: &Caller, call: &Call) -> Answer {
        let answered = match self.generation {
            Generation::A => generation_a::ask(self.channel.clone(), caller, call).await,
            Generation::C => generation_c::ask(self.channel.clone(), caller, call).await,
        };
        match answered {
            Ok(body) => Answer::ok(body),
            Err(status) => Answer::from_status(self.generation, &status),
        }
    }

    /// Starts a call. `on_answer` is called with the answer before any waiter gets it.
    pub fn start(
        &self,
        caller: Caller,
        call: Call,
        on_answer: impl FnOnce(&Answer) + Send + 'static,
    ) -> Pending {
        let (sender, answer) = watch::channel(None);
        let client = self.clone();
        let mut asking = Box::pin(async move { client.ask(&caller, &call).await });
        // The call is polled here and not only in the spawned task, so that calls on one connection leave in
        // the order of their starts.
        let mut begun = match asking.as_mut().poll(&mut Context::from_waker(Waker::noop())) {
            Poll::Ready(answer) => Some(answer),
            Poll::Pending => None,
        };
        let task = tokio::spawn(async move {
            let answer = match begun.take() {
                Some(answer) => answer,
                None => asking.await,
            };
            on_answer(&answer);
            // The waiter may be gone.
            let _ = sender.send(Some(answer));
        });
        Pending { answer, task: Arc::new(Mutex::new(Some(task))) }
    }
}

/// A call that may still be waiting for its answer.
#[derive(Clone)]
pub struct Pending {
    answer: watch::Receiver<Option<Answer>>,
    task: Arc<Mutex<Option<JoinHandle<()>>>>,
}

impl Pending {
    /// Returns the answer, if it has arrived.
    pub fn answer(&self) -> Option<Answer> {
        self.answer.borrow().clone()
    }

    /// Waits for the answer, for `limit` at most.
    pub async fn within(&self, limit: Duration) -> Option<Answer> {
        let mut answer = self.answer.clone();
        let answered = answer.wait_for(Option::is_some);
        match tokio::time::timeout(limit, answered).await {
            Ok(Ok(found)) => found.clone(),
            // Cancelled, or too late.
            Ok(Err(_)) | Err(_) => None,
        }
    }

    /// Cancels the call; the service notices that the caller is gone.
    pub fn hang_up(&self) {
        let task = self.task.lock().map(|mut task| task.take()).unwrap_or_default();
        if let Some(task) = task {
            task.abort();
        }
    }
}
