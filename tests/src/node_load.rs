//! Load of many clients on a local node.

use std::io;
use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, PoisonError};
use std::thread;
use std::time::Duration;

use crate::client::PlainHttpClient;
use crate::rouse::RouseNode;
use crate::wait::sleep;

/// Load of one test: target, request and number of clients.
#[derive(Clone, Debug)]
pub struct LoadPlan {
    /// Address to connect to.
    pub target: SocketAddr,
    /// Value of the Host header.
    pub host: String,
    /// Path and query of the requests.
    pub path: String,
    /// Number of clients at once.
    pub clients: usize,
    /// True if each client keeps its connection.
    pub keep_alive: bool,
}

impl LoadPlan {
    /// Sends one request, over `kept` if it is still open. Returns the connection if it can carry another request.
    pub fn send_request(
        &self,
        kept: Option<PlainHttpClient>,
    ) -> (SentRequest, Option<PlainHttpClient>) {
        let kept = kept.filter(|client| !client.is_closed());
        let fresh = kept.is_none();
        let lost = |why: io::Error| {
            (
                SentRequest {
                    on_new_connection: fresh,
                    direct: false,
                    pod: String::new(),
                    lost: Some(why.to_string()),
                },
                None,
            )
        };
        let mut client = match kept.map_or_else(|| PlainHttpClient::connect(self.target), Ok) {
            Ok(client) => client,
            Err(why) => return lost(why),
        };
        let answer = match client.get(&self.host, &self.path) {
            Ok(answer) => answer,
            Err(why) => return lost(why),
        };
        let code = (answer.status != 200).then(|| format!("{}: {}", answer.status, answer.body));
        let direct = answer.header("x-peer") == client.local_ip();
        let sent = SentRequest {
            on_new_connection: fresh,
            direct,
            pod: answer.header("x-pod").to_owned(),
            lost: code,
        };
        let keeps = !answer.header("connection").eq_ignore_ascii_case("close");
        (sent, Some(client).filter(|_| keeps))
    }
}

/// Result of one request of a load.
#[derive(Clone, Debug)]
pub struct SentRequest {
    /// True if the request opened its connection.
    pub on_new_connection: bool,
    /// True if the pod saw this client as its peer, and not the activator.
    pub direct: bool,
    /// Name of the pod that answered.
    pub pod: String,
    /// Reason that the request was lost; `None` if the application answered 200.
    pub lost: Option<String>,
}

/// A load that runs until it is stopped.
#[derive(Debug)]
pub struct RunningLoad<'a> {
    stop: &'a AtomicBool,
    sent: &'a Mutex<Vec<SentRequest>>,
}

impl RunningLoad<'_> {
    /// Number of requests that have ended so far.
    pub fn count(&self) -> usize {
        self.sent.lock().unwrap_or_else(PoisonError::into_inner).len()
    }

    /// Lets each client end after its current request.
    pub fn stop(&self) {
        self.stop.store(true, Ordering::Relaxed);
    }
}

/// Runs load while `meanwhile` runs. Returns all requests, in the order of their ends, and the result of `meanwhile`.
pub fn with_load<T>(
    node: &RouseNode,
    plan: &LoadPlan,
    meanwhile: impl FnOnce(&RunningLoad<'_>) -> T,
) -> (Vec<SentRequest>, T) {
    let (stop, sent) = (AtomicBool::new(false), Mutex::new(Vec::new()));
    let done = thread::scope(|scope| {
        for _ in 0..plan.clients {
            scope.spawn(|| run_client(node, plan, &stop, &sent));
        }
        let load = RunningLoad { stop: &stop, sent: &sent };
        // A panic must not leave the clients running, because the scope would wait for them.
        let done = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| meanwhile(&load)));
        load.stop();
        done
    });
    let sent = sent.into_inner().unwrap_or_else(PoisonError::into_inner);
    (sent, done.unwrap_or_else(|panic| std::panic::resume_unwind(panic)))
}

fn run_client(
    node: &RouseNode,
    plan: &LoadPlan,
    stop: &AtomicBool,
    sent: &Mutex<Vec<SentRequest>>,
) {
    node.enter_client_netns();
    let mut kept = None;
    while !stop.load(Ordering::Relaxed) {
        let (one, client) = plan.send_request(kept.take());
        kept = client.filter(|_| plan.keep_alive);
        let failed = one.lost.is_some();
        sent.lock().unwrap_or_else(PoisonError::into_inner).push(one);
        if failed {
            // Immediate refusals must not cause a busy loop.
            sleep(Duration::from_millis(50));
        }
    }
}

/// Requests of `sent` that were lost.
pub fn lost_requests(sent: &[SentRequest]) -> Vec<&SentRequest> {
    sent.iter().filter(|one| one.lost.is_some()).collect()
}
