//! Load of many clients on a local node.

use std::io;
use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, PoisonError};
use std::thread;
use std::time::Duration;

use crate::http_client::PlainHttpClient;
use crate::rouse_node::RouseNode;
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
    /// Sends one request, over `pooled` if it is still open. Returns the connection if it can carry another request.
    pub fn send_request(
        &self,
        pooled: Option<PlainHttpClient>,
    ) -> (SentRequest, Option<PlainHttpClient>) {
        let pooled = pooled.filter(|client| !client.is_closed());
        let on_new_connection = pooled.is_none();
        let lost = |error: io::Error| {
            (
                SentRequest {
                    on_new_connection,
                    direct: false,
                    pod: String::new(),
                    lost: Some(error.to_string()),
                },
                None,
            )
        };
        let mut client = match pooled.map_or_else(|| PlainHttpClient::connect(self.target), Ok) {
            Ok(client) => client,
            Err(error) => return lost(error),
        };
        let response = match client.get(&self.host, &self.path) {
            Ok(response) => response,
            Err(error) => return lost(error),
        };
        let lost =
            (response.status != 200).then(|| format!("{}: {}", response.status, response.body));
        let direct = response.header("x-peer") == client.local_ip();
        let request = SentRequest {
            on_new_connection,
            direct,
            pod: response.header("x-pod").to_owned(),
            lost,
        };
        let keeps = !response.header("connection").eq_ignore_ascii_case("close");
        (request, Some(client).filter(|_| keeps))
    }
}

/// Result of one request of a load.
#[derive(Clone, Debug)]
pub struct SentRequest {
    /// True if the request opened its connection.
    pub on_new_connection: bool,
    /// True if the pod saw this client as its peer, and not the activator.
    pub direct: bool,
    /// Name of the pod that responded.
    pub pod: String,
    /// Reason that the request was lost; `None` if the application responded with 200.
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
    let (stop, requests) = (AtomicBool::new(false), Mutex::new(Vec::new()));
    let result = thread::scope(|scope| {
        for _ in 0..plan.clients {
            scope.spawn(|| run_client(node, plan, &stop, &requests));
        }
        let load = RunningLoad { stop: &stop, sent: &requests };
        // A panic must not leave the clients running, because the scope would wait for them.
        let result = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| meanwhile(&load)));
        load.stop();
        result
    });
    let requests = requests.into_inner().unwrap_or_else(PoisonError::into_inner);
    (requests, result.unwrap_or_else(|panic| std::panic::resume_unwind(panic)))
}

fn run_client(
    node: &RouseNode,
    plan: &LoadPlan,
    stop: &AtomicBool,
    requests: &Mutex<Vec<SentRequest>>,
) {
    node.enter_client_netns();
    let mut pooled = None;
    while !stop.load(Ordering::Relaxed) {
        let (request, client) = plan.send_request(pooled.take());
        pooled = client.filter(|_| plan.keep_alive);
        let failed = request.lost.is_some();
        requests.lock().unwrap_or_else(PoisonError::into_inner).push(request);
        if failed {
            // Immediate refusals must not cause a busy loop.
            sleep(Duration::from_millis(50));
        }
    }
}

/// Requests of `requests` that were lost.
pub fn lost_requests(requests: &[SentRequest]) -> Vec<&SentRequest> {
    requests.iter().filter(|request| request.lost.is_some()).collect()
}
