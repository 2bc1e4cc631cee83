//! Shell: memory of idle connections and of waiting requests, and the release of the waiting ones.

use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use tokio::time::sleep;

use crate::{
    cases::{ASLEEP_HOST, AWAKE_HOST, GatewaySubject},
    cores::BenchCores,
    crowd::{CROWD_SIZE, ClientCrowd, within},
    figures::Figure,
    fixture::{GatewayFixture, GatewayProcess},
    open_loop::OpenLoop,
    played_controller::{ready_pod, revision_name, starting_pod},
    pods::CountingPod,
    process::pause,
};

/// Number of pods that become ready for the waiting requests.
const PODS: usize = 10;
/// Time between two of them: all are ready within 100 ms.
const POD_INTERVAL: Duration = Duration::from_millis(10);
/// Time after which memory is read: idle connections to pods have been closed, and all requests were received.
const SETTLE_TIME: Duration = Duration::from_secs(2);
/// Time in which a request that did not wait would show its response.
const EARLY_TIME: Duration = Duration::from_millis(200);
/// Timeout of the responses to all waiting requests.
const RELEASE_TIMEOUT: Duration = Duration::from_secs(60);
const KIB: f64 = 1024.0;

/// Figures of one crowd, in the order in which they are measured.
#[derive(Clone, Debug, Default)]
pub(crate) struct CrowdFigures {
    pub(crate) idle: Vec<Figure>,
    /// Empty for proxies without a wait queue, as is `release`.
    pub(crate) waiting: Vec<Figure>,
    pub(crate) release: Vec<Figure>,
}

/// Measures a new process of a proxy: the allocator of a used one would take what earlier connections have left. After
/// a failure, `figures` contains those before it.
pub(crate) fn measure_crowd(
    fixture: &GatewayFixture,
    subject: GatewaySubject,
    figures: &mut CrowdFigures,
) -> Result<()> {
    let proxy = fixture.start_proxy(subject)?;
    warm_up(&proxy)?;
    let empty = proxy.process.memory_bytes()?;
    let mut crowd = fixture.runtime.block_on(ClientCrowd::connect(proxy.h1_address()))?;
    fixture.runtime.block_on(crowd.exchange_each(AWAKE_HOST))?;
    figures.idle = memory_figures(&proxy, empty)?;
    if subject.is_activator() {
        fixture.runtime.block_on(crowd.send_each(ASLEEP_HOST))?;
        figures.waiting = memory_figures(&proxy, empty)?;
        figures.release = fixture.runtime.block_on(release(&proxy, fixture.cores, crowd))?;
    }
    Ok(())
}

/// Sends requests over one connection: code and buffers that all connections share are in use then.
fn warm_up(proxy: &GatewayProcess) -> Result<()> {
    let exchanges = OpenLoop {
        to: proxy.h1_address(),
        host: AWAKE_HOST,
        connections: 1,
        per_s: 1_000.0,
        length: Duration::from_secs(1),
    };
    exchanges.run()?;
    pause(SETTLE_TIME);
    Ok(())
}

/// Memory of one connection, after a pause.
fn memory_figures(proxy: &GatewayProcess, empty: f64) -> Result<Vec<Figure>> {
    pause(SETTLE_TIME);
    let each = (proxy.process.memory_bytes()? - empty) / CROWD_SIZE as f64 / KIB;
    Ok(vec![("kib", each)])
}

/// Makes pods ready one after the other, and waits for the responses to all waiting requests. As from a real controller,
/// the RouteTable lists the pods while they start.
async fn release(
    proxy: &GatewayProcess,
    cores: BenchCores,
    crowd: ClientCrowd,
) -> Result<Vec<Figure>> {
    let mut responses = crowd.receive_each();
    let controller = proxy.activator_controller()?;
    let pods: Vec<CountingPod> =
        (0..PODS).map(|_| CountingPod::start("hello")).collect::<Result<_>>()?;
    let (revision, uid) = (revision_name("asleep"), |number: usize| format!("asleep-{number}"));
    let starting = pods.iter().enumerate();
    let starting = starting.map(|(at, pod)| starting_pod(&uid(at), &revision, pod.address));
    controller.set(starting);
    controller.wait_in_force().await?;
    sleep(EARLY_TIME).await;
    let too_early = responses.try_join_next();
    ensure!(too_early.is_none(), "a request did not wait: {too_early:?}");
    let (before, begin) = (cores.times()?, Instant::now());
    for (number, pod) in pods.iter().enumerate() {
        controller.set([ready_pod(&uid(number), &revision, pod.address)]);
        if number + 1 < PODS {
            sleep(POD_INTERVAL).await;
        }
    }
    let mut last = begin;
    let all = async {
        while let Some(response) = responses.join_next().await {
            last = last.max(response.context("a client panicked")??);
        }
        anyhow::Ok(())
    };
    within(RELEASE_TIMEOUT, all).await??;
    let (used, elapsed_s) = (cores.times()?.since(before), begin.elapsed().as_secs_f64());
    let counts: Vec<usize> = pods.iter().map(CountingPod::request_count).collect();
    let sum: usize = counts.iter().sum();
    ensure!(sum == CROWD_SIZE, "the pods had {sum} requests, not {CROWD_SIZE}");
    let most = counts.iter().max().copied().unwrap_or_default();
    let even_share = CROWD_SIZE as f64 / PODS as f64;
    Ok(vec![
        ("ms", last.duration_since(begin).as_secs_f64() * 1e3),
        ("most_share", most as f64 / even_share),
        ("client_core_percent", used.client_s / elapsed_s * 100.0),
        ("proxy_core_percent", used.proxy_s / elapsed_s * 100.0),
    ])
}
