//! Time from a pod's report until the last of 1,000 agents has the pod as ready, while services wake.
//!
//! `cargo bench -p controller --bench fanout`: a process of its own has the controller's state machine and its streams,
//! without an API server. It decides the first pod of one sleeping service after another. One agent reports each pod as
//! ready as soon as the pod is in its routes. `FANOUT=AGENTS,WAKES,PER_SECOND` sets another load. Prints one JSON line.
//! The bench uses nothing but the protocol and the state machine, so it also measures earlier commits.
#![allow(clippy::print_stderr, reason = "the bench runs for a minute, and shows its progress")]

use std::{
    env, fs,
    io::{Read as _, Write as _},
    net::SocketAddr,
    path::Path,
    process::{Child, Command, Stdio},
    sync::{Arc, atomic::Ordering},
    time::{Duration, Instant},
};

use common::{
    local_node::LocalNodeSpec,
    outbox::Outbox,
    wire::{ConnectionPath, NamespacedName, RevisionActivity, ScaleDecision},
};
use controller::{
    decide::machine::{ControllerEvent, ControllerStateMachine},
    model::{cluster_state::ClusterState, scale_policy::ScalePolicyConfig},
    read::parse::{self, ManifestDocument},
    shell::{grpc_services, runtime::ControllerRuntime},
};
use serde_json::json;
use tokio::{sync::watch, time::MissedTickBehavior};
use tokio_util::sync::CancellationToken;

mod route_agents;
#[path = "../support/route_items.rs"]
mod route_items;
#[path = "../support/sleepers.rs"]
mod sleepers;

use route_agents::WakeRecords;
use sleepers::service_manifest;

/// The allocator that `rouse` uses.
#[global_allocator]
static ALLOCATOR: tikv_jemallocator::Jemalloc = tikv_jemallocator::Jemalloc;

type FanoutBenchError = Box<dyn std::error::Error + Send + Sync>;

/// Interval between two looks at the progress.
const POLL_INTERVAL: Duration = Duration::from_millis(20);
/// Time within which all agents must have the first table, and time for the last wakes after the last decision.
const WAIT_TIMEOUT: Duration = Duration::from_secs(120);

/// Number of agents, number of services that wake, and wakes a second.
#[derive(Clone, Copy, Debug)]
struct FanoutLoad {
    agents: usize,
    wakes: usize,
    per_second: u32,
}

impl FanoutLoad {
    fn parse(text: &str) -> Result<Self, FanoutBenchError> {
        let numbers: Result<Vec<u32>, _> = text.split(',').map(str::parse).collect();
        let numbers = numbers?;
        let [agents, wakes, per_second] = numbers[..] else {
            return Err("FANOUT is AGENTS,WAKES,PER_SECOND, such as 1000,1000,100".into());
        };
        if numbers.contains(&0) {
            return Err("no number in FANOUT may be 0".into());
        }
        Ok(Self { agents: agents.try_into()?, wakes: wakes.try_into()?, per_second })
    }
}

fn main() -> Result<(), FanoutBenchError> {
    // Agents are refused until the controller listens, as expected, so these errors are not shown.
    let filter = env::var("RUST_LOG").unwrap_or_else(|_| "warn,common::link=error".into());
    tracing_subscriber::fmt()
        .with_env_filter(tracing_subscriber::EnvFilter::new(filter))
        .with_writer(std::io::stderr)
        .init();
    let load = env::var("FANOUT").unwrap_or_else(|_| "1000,1000,100".into());
    let load = FanoutLoad::parse(&load)?;
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build()?;
    let args: Vec<String> = env::args().collect();
    match args.iter().map(String::as_str).collect::<Vec<_>>().as_slice() {
        [_, "controller", listen] => runtime.block_on(run_controller(listen, load)),
        _ => runtime.block_on(measure(load)),
    }
}

/// Runs the controller's state machine and streams. A line on standard input begins the wakes, and the end of standard
/// input ends the process.
async fn run_controller(listen: &str, load: FanoutLoad) -> Result<(), FanoutBenchError> {
    let (node_spec, _node_spec_rx) = watch::channel(LocalNodeSpec::default());
    let machine = ControllerStateMachine::new(ClusterState::default(), Outbox::new());
    let runtime = Arc::new(ControllerRuntime::new(machine, node_spec));
    runtime.release_node_spec();
    for at in 0..load.wakes {
        let config = ScalePolicyConfig::default();
        for document in parse::manifest_documents(&service_manifest(at), &config) {
            let ManifestDocument::Service { name, manifest } = document else {
                return Err("the manifest of the bench was refused".into());
            };
            runtime.step(ControllerEvent::ManifestApplied { name, manifest });
        }
    }
    let stop = CancellationToken::new();
    tokio::select! {
        served = grpc_services::serve(Arc::clone(&runtime), listen, stop.clone()) => Ok(served?),
        () = runtime.run_timers(stop.clone()) => Ok(()),
        ended = wake_services(&runtime, load) => ended,
    }
}

/// Waits for a line on standard input, then wakes one service after another. Returns only after an error.
async fn wake_services(
    runtime: &ControllerRuntime,
    load: FanoutLoad,
) -> Result<(), FanoutBenchError> {
    let read_line = || std::io::stdin().read_line(&mut String::new());
    tokio::task::spawn_blocking(read_line).await??;
    std::thread::spawn(end_with_parent);
    let mut ticks = tokio::time::interval(Duration::from_secs(1) / load.per_second);
    // A late tick is made up for: the load does not follow the speed of what is measured.
    ticks.set_missed_tick_behavior(MissedTickBehavior::Burst);
    for at in 0..load.wakes {
        ticks.tick().await;
        runtime.step(ControllerEvent::DecisionReceived(wake_decision(at)));
    }
    std::future::pending().await
}

/// Ends the controller's process with the bench, whose pipe to its standard input closes then.
fn end_with_parent() {
    let _ = std::io::stdin().read_to_end(&mut Vec::new());
    std::process::exit(0);
}

fn wake_decision(at: usize) -> ScaleDecision {
    ScaleDecision {
        revision: NamespacedName::new("default", format!("sleeper-{at}-00001")),
        requested_scale: Some(1),
        connection_path: ConnectionPath::Direct,
        activator_count: 0,
        activity: RevisionActivity::Active,
        stable_load: 0.0,
        panic_load: 1.0,
        target_load: 70.0,
        ready_pods: 0,
        is_panicking: false,
        excess_burst_capacity: 0.0,
        reason: "a request waits".into(),
        inputs: None,
        wake_origin: None,
    }
}

async fn measure(load: FanoutLoad) -> Result<(), FanoutBenchError> {
    let listen = std::net::TcpListener::bind(("127.0.0.1", 0))?.local_addr()?;
    let mut controller = FanoutController::start(listen)?;
    let records = Arc::new(WakeRecords::new(load.agents, load.wakes));
    route_agents::start_agents(&format!("http://{listen}"), &records);
    let has_tables = || records.complete_tables.load(Ordering::Relaxed) == load.agents + 1;
    if !wait_until(WAIT_TIMEOUT, has_tables).await {
        let count = records.complete_tables.load(Ordering::Relaxed);
        return Err(format!("{count} of {} agents have a table", load.agents + 1).into());
    }
    eprintln!("{} agents have the whole table", load.agents);
    let idle_mib = controller.memory_mib("VmRSS:")?;
    let (began, cpu_before) = (Instant::now(), [controller.cpu_s()?, own_cpu_s()?]);
    controller.begin_wakes()?;
    let timeout = Duration::from_secs(1) * u32::try_from(load.wakes)? / load.per_second;
    let is_complete = wait_until(timeout + WAIT_TIMEOUT, || {
        records.completed_wakes.load(Ordering::Relaxed) == load.wakes
    })
    .await;
    let seconds = began.elapsed().as_secs_f64();
    let row = json!({
        "agents": load.agents, "wakes": load.wakes, "per_second": load.per_second,
        "seconds": seconds, "latencies_ms": records.latencies_ms(),
        "cpu_percent": 100.0 * (controller.cpu_s()? - cpu_before[0]) / seconds,
        "agents_cpu_percent": 100.0 * (own_cpu_s()? - cpu_before[1]) / seconds,
        "idle_mib": idle_mib, "peak_mib": controller.memory_mib("VmHWM:")?,
        "ended_streams": records.ended_streams.load(Ordering::Relaxed), "is_complete": is_complete,
    });
    writeln!(std::io::stdout(), "{row}")?;
    Ok(())
}

/// Waits until `holds`; returns false after `timeout`.
async fn wait_until(timeout: Duration, holds: impl Fn() -> bool) -> bool {
    let begun = Instant::now();
    while !holds() {
        if begun.elapsed() > timeout {
            return false;
        }
        tokio::time::sleep(POLL_INTERVAL).await;
    }
    true
}

/// Process of the controller, which is killed when this value is dropped.
struct FanoutController {
    child: Child,
}

impl FanoutController {
    fn start(listen: SocketAddr) -> Result<Self, FanoutBenchError> {
        let mut command = Command::new(env::current_exe()?);
        command.args(["controller", &format!("http://{listen}")]).stdin(Stdio::piped());
        Ok(Self { child: command.spawn()? })
    }

    fn begin_wakes(&mut self) -> Result<(), FanoutBenchError> {
        let input = self.child.stdin.as_mut().ok_or("the controller has no standard input")?;
        Ok(input.write_all(b"\n")?)
    }

    /// Returns a line of `/proc/PID/status` in MiB.
    fn memory_mib(&self, line: &str) -> Result<f64, FanoutBenchError> {
        let status = fs::read_to_string(format!("/proc/{}/status", self.child.id()))?;
        let value = status.lines().find_map(|it| it.strip_prefix(line)?.strip_suffix("kB"));
        Ok(value.unwrap_or_default().trim().parse::<f64>()? / 1024.0)
    }

    fn cpu_s(&self) -> Result<f64, FanoutBenchError> {
        process_cpu_s(&self.child.id().to_string())
    }
}

impl Drop for FanoutController {
    fn drop(&mut self) {
        // The process may have ended by itself; then the bench has failed already.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn own_cpu_s() -> Result<f64, FanoutBenchError> {
    process_cpu_s("self")
}

/// Returns the CPU time of user and kernel in seconds, read in hundredths: `USER_HZ` is 100 on every platform.
fn process_cpu_s(process: &str) -> Result<f64, FanoutBenchError> {
    let stat = fs::read_to_string(Path::new("/proc").join(process).join("stat"))?;
    let (_, fields) = stat.rsplit_once(')').ok_or("no name in stat")?;
    let ticks = fields.split_whitespace().skip(11).take(2).map(str::parse::<f64>);
    Ok(ticks.sum::<Result<f64, _>>()? / 100.0)
}
