//! Shell: a client with a pool, as `rounds` of `tests/servers/go/pools.go`, on the client of hyper-util.
//!
//! That client sends a request again if no byte of it was sent on a connection that has closed. All other failures are
//! left to the application, which sends a request again if its connection had served one before.

use std::{
    collections::{BTreeMap, HashSet},
    io::{self, BufRead as _, Write as _},
    net::SocketAddr,
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicI64, Ordering},
    },
};

use anyhow::{Context as _, Result, bail};
use http_body_util::{BodyExt as _, Empty};
use hyper::{
    Response, StatusCode, Uri,
    body::{Bytes, Incoming},
    http::Extensions,
};
use hyper_util::{
    client::legacy::{
        Client, Error as ClientError,
        connect::{HttpConnector, HttpInfo},
    },
    rt::TokioExecutor,
};
use tokio::{sync::Barrier, task::JoinSet};

/// Pool of a client, with the connections that have served a request.
struct HyperPool {
    uri: Uri,
    client: Client<HttpConnector, Empty<Bytes>>,
    /// Addresses of these connections at the client's side.
    used_connections: Mutex<HashSet<SocketAddr>>,
}

/// Requests that each pod has served; those without a pod have failed.
type PodCounts = BTreeMap<Option<String>, usize>;

/// Runs the client until its input ends. Each line is the number of requests in a round, and a line of the output has
/// the result.
pub(crate) async fn run(url: &str, workers: &str) -> Result<()> {
    let workers: usize = workers.parse().context("WORKERS is no number")?;
    let client = Client::builder(TokioExecutor::new()).pool_max_idle_per_host(workers).build_http();
    let uri: Uri = url.parse().context("URL is not valid")?;
    let client = Arc::new(HyperPool { uri, client, used_connections: Mutex::default() });
    for line in io::stdin().lock().lines() {
        let requests: i64 = line?.trim().parse().context("the input has no number of requests")?;
        let served = request_round(&client, workers, requests).await;
        writeln!(io::stdout(), "{}", format_round(served))?;
    }
    Ok(())
}

/// Formats a result, such as `0 pod-a=50 pod-b=50`.
fn format_round(mut served: PodCounts) -> String {
    let failed = served.remove(&None).unwrap_or(0);
    let words = served.into_iter().filter_map(|(pod, count)| Some(format!(" {}={count}", pod?)));
    format!("{failed}{}", words.collect::<String>())
}

/// Sends one round of requests by workers that share the pool.
async fn request_round(client: &Arc<HyperPool>, workers: usize, requests: i64) -> PodCounts {
    let left = Arc::new(AtomicI64::new(requests));
    let begin = Arc::new(Barrier::new(workers));
    let mut tasks = JoinSet::new();
    for _ in 0..workers {
        let (client, left, begin) = (Arc::clone(client), Arc::clone(&left), Arc::clone(&begin));
        tasks.spawn(async move {
            let mut served = PodCounts::new();
            // Otherwise the first ones may send all requests before the last one begins, as on a busy machine. Idle
            // connections would then stay unused for a round, and serve the next one.
            begin.wait().await;
            while left.fetch_sub(1, Ordering::Relaxed) > 0 {
                let asked = client.ask().await;
                let pod = asked.inspect_err(|error| eprintln!("{error:#}")).ok();
                *served.entry(pod).or_default() += 1;
            }
            served
        });
    }
    let mut served = PodCounts::new();
    for (pod, count) in tasks.join_all().await.into_iter().flatten() {
        *served.entry(pod).or_default() += count;
    }
    served
}

impl HyperPool {
    /// Returns the name of the pod that has served a request.
    async fn ask(&self) -> Result<String> {
        // Each failure takes a connection out of the pool, so that this ends.
        loop {
            match self.client.get(self.uri.clone()).await {
                Ok(response) => return self.read_pod(response).await,
                Err(error) if self.was_used(&error) => {}
                Err(error) => return Err(error).context("the request has failed"),
            }
        }
    }

    async fn read_pod(&self, response: Response<Incoming>) -> Result<String> {
        if response.status() != StatusCode::OK {
            bail!("status {}", response.status());
        }
        let pod = response.headers().get("x-pod").context("the response names no pod")?;
        let pod = pod.to_str()?.to_owned();
        if let Some(connection) = response.extensions().get::<HttpInfo>() {
            let address = connection.local_addr();
            self.used_connections.lock().unwrap_or_else(PoisonError::into_inner).insert(address);
        }
        response.into_body().collect().await.context("the response was cut off")?;
        Ok(pod)
    }

    /// Returns true if a request has failed on a connection that had served one before.
    fn was_used(&self, error: &ClientError) -> bool {
        let Some(connection) = error.connect_info() else { return false };
        let mut extensions = Extensions::new();
        connection.get_extras(&mut extensions);
        let used = self.used_connections.lock().unwrap_or_else(PoisonError::into_inner);
        extensions.get::<HttpInfo>().is_some_and(|it| used.contains(&it.local_addr()))
    }
}
