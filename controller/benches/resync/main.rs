//! Time from a controller's start until all agents have the whole table and the controller has nothing to write.
//!
//! `cargo bench -p controller --bench resync`: a process of its own runs the controller as it ships. It uses a fake API
//! server that holds the objects made by an earlier controller. Agents run from the beginning and connect until they
//! get a response. Each reports its node's pods, and an autoscaler sends its decisions. `RESYNC=SERVICES,PODS,NODES`
//! sets another size. Prints one JSON line.
#![allow(clippy::print_stderr, reason = "the bench runs for minutes, and shows its progress")]

use std::{
    env, fs,
    io::{Read as _, Write as _},
    net::{SocketAddr, TcpStream},
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    sync::{Arc, atomic::Ordering},
    time::{Duration, Instant, SystemTime, UNIX_EPOCH},
};

use controller::{
    model::{cluster_state::UnixMillis, object::ResourceKind},
    shell::config,
};
use serde_json::{Value, json};
use tokio_util::sync::CancellationToken;

mod desired_cluster;
mod fake_agents;
mod fake_apiserver;
#[path = "../support/route_items.rs"]
mod route_items;

use desired_cluster::{ClusterSize, DesiredCluster, SYSTEM};
use fake_agents::AgentStreamCounts;
use fake_apiserver::FakeApiObjects;

/// The allocator that `rouse` uses.
#[global_allocator]
static ALLOCATOR: tikv_jemallocator::Jemalloc = tikv_jemallocator::Jemalloc;

type ResyncBenchError = Box<dyn std::error::Error + Send + Sync>;

/// Interval between two reads of the controller's metrics.
const POLL_INTERVAL: Duration = Duration::from_millis(100);
/// Time within which the controller must become idle.
const IDLE_TIMEOUT: Duration = Duration::from_secs(600);

fn main() -> Result<(), ResyncBenchError> {
    // Agents are refused until the controller listens, as expected, so these errors are not shown.
    let filter = env::var("RUST_LOG").unwrap_or_else(|_| "warn,common::link=error".into());
    tracing_subscriber::fmt()
        .with_env_filter(tracing_subscriber::EnvFilter::new(filter))
        .with_writer(std::io::stderr)
        .init();
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build()?;
    let args: Vec<String> = env::args().collect();
    match args.iter().map(String::as_str).collect::<Vec<_>>().as_slice() {
        [_, "controller", kubeconfig, listen, admin] => {
            std::thread::spawn(end_with_parent);
            runtime.block_on(run_controller(kubeconfig, listen, admin.parse()?))
        }
        _ => runtime.block_on(measure(cluster_size()?)),
    }
}

/// Ends the controller's process with the bench, whose pipe to its standard input closes then.
fn end_with_parent() {
    let _ = std::io::stdin().read_to_end(&mut Vec::new());
    std::process::exit(0);
}

fn cluster_size() -> Result<ClusterSize, ResyncBenchError> {
    let text = env::var("RESYNC").unwrap_or_else(|_| "10000,10,100".into());
    let numbers: Result<Vec<usize>, _> = text.split(',').map(str::parse).collect();
    match numbers?.as_slice() {
        [services, pods, nodes] if *nodes > 0 => {
            Ok(ClusterSize { services: *services, pods: *pods, nodes: *nodes })
        }
        _ => Err("RESYNC is SERVICES,PODS,NODES, such as 1000,10,100".into()),
    }
}

/// Runs the controller as it ships, but without TLS and without the webhook.
async fn run_controller(
    kubeconfig: &str,
    listen: &str,
    admin: SocketAddr,
) -> Result<(), ResyncBenchError> {
    let domain = "example.com".into();
    let own =
        controller::ControllerConfig { listen: listen.into(), admin, domain, ..Default::default() };
    let cluster = config::KubernetesConfig {
        kubeconfig: Some(kubeconfig.into()),
        system_namespace: SYSTEM.into(),
        pod: "controller".into(),
        cluster_domain: "cluster.local".into(),
        webhook: None,
        webhook_url: None,
    };
    Ok(controller::run_on_kubernetes(own, cluster, CancellationToken::new()).await?)
}

async fn measure(size: ClusterSize) -> Result<(), ResyncBenchError> {
    let began = Instant::now();
    let now = SystemTime::now().duration_since(UNIX_EPOCH)?.as_millis();
    let hour_ago = UnixMillis(u64::try_from(now)? - 3_600_000);
    // A long computation, which must not hold up the runtime's other tasks.
    let mut cluster = tokio::task::block_in_place(|| DesiredCluster::new(size, hour_ago));
    assert_eq!(cluster.count(ResourceKind::Revision), size.services);
    let stop = CancellationToken::new();
    let [listen, admin] = [free_port()?, free_port()?];
    let endpoint = format!("http://{listen}");
    let counts = fake_agents::start_agents(&mut cluster, size.nodes, &endpoint, &stop);
    let objects = Arc::new(FakeApiObjects::from_cluster(cluster));
    let (count, bytes) = objects.count_and_bytes();
    eprintln!("{count} objects, {} MB, made in {:.1?}", bytes >> 20, began.elapsed());
    let api = fake_apiserver::serve(Arc::clone(&objects)).await?;
    // The process starts last, so that its time includes nothing of the preparation.
    let controller = ControllerProcess::start(api, &endpoint, admin)?;
    let times = wait_until_idle(size, &controller, &counts, admin).await;
    let (cpu, peak) = (controller.cpu_s()?, controller.peak_mib()?);
    stop.cancel();
    let agents = u64::try_from(size.nodes - 1)?.max(1);
    let row = json!({
        "services": size.services, "pods": size.services * size.pods, "agents": size.nodes, "objects": count,
        "known_s": times.observed_s, "whole_s": times.complete_tables_s, "rest_s": times.idle_s, "cpu_s": cpu, "peak_mib": peak,
        "table_items": counts.items.load(Ordering::Relaxed) / agents,
        "table_bytes": counts.bytes.load(Ordering::Relaxed) / agents,
        "writes": objects.writes(), "is_complete": times.is_complete,
    });
    writeln!(std::io::stdout(), "{row}")?;
    Ok(())
}

/// Times of a start, in seconds since the controller's process was started.
#[derive(Debug, Default)]
struct StartupTimes {
    /// Time at which all objects were observed and the first agent had a stream.
    observed_s: f64,
    /// Time at which every agent had a whole table.
    complete_tables_s: f64,
    /// Time at which every report was handled and no object was left to check.
    idle_s: f64,
    is_complete: bool,
}

async fn wait_until_idle(
    size: ClusterSize,
    controller: &ControllerProcess,
    agent_counts: &AgentStreamCounts,
    admin: SocketAddr,
) -> StartupTimes {
    let (mut times, mut last_metrics) = (StartupTimes::default(), Value::Null);
    let expected = (size.services, size.services * size.pods);
    while controller.started.elapsed() < IDLE_TIMEOUT {
        tokio::time::sleep(POLL_INTERVAL).await;
        let now = controller.started.elapsed().as_secs_f64();
        let at = |first: &mut f64, is: bool| {
            if is && *first == 0.0 {
                *first = now;
            }
        };
        at(&mut times.observed_s, agent_counts.streams.load(Ordering::Relaxed) > 0);
        at(
            &mut times.complete_tables_s,
            agent_counts.complete_tables.load(Ordering::Relaxed) == size.nodes,
        );
        let counts = tokio::task::block_in_place(|| read_metric_sums(admin)).unwrap_or_default();
        let table = (
            agent_counts.services.load(Ordering::Relaxed),
            agent_counts.ready.load(Ordering::Relaxed),
        );
        let steps = counts["steps"].as_f64().unwrap_or(0.0);
        // A step for each pod as object and as report, and one for each decision.
        let all_taken = steps >= (2 * expected.1 + expected.0) as f64;
        if counts != last_metrics || counts["waits"] != 0.0 || counts["leads"] != 1.0 || !all_taken
        {
            (last_metrics, times.idle_s) = (counts, 0.0);
            continue;
        }
        at(&mut times.idle_s, times.complete_tables_s > 0.0 && table == expected);
        if times.idle_s > 0.0 {
            // The condition held for the first time in the round before this one.
            times.idle_s =
                (times.idle_s - POLL_INTERVAL.as_secs_f64()).max(times.complete_tables_s);
            times.is_complete = true;
            break;
        }
    }
    times
}

/// Reads sums of the controller's metrics.
fn read_metric_sums(admin: SocketAddr) -> std::io::Result<Value> {
    let mut stream = TcpStream::connect(admin)?;
    stream.write_all(b"GET /metrics HTTP/1.1\r\nHost: bench\r\nConnection: close\r\n\r\n")?;
    let mut text = String::new();
    stream.read_to_string(&mut text)?;
    let sum = |name: &str| -> f64 {
        let lines = text.lines().filter_map(|it| it.strip_prefix(name));
        lines.filter_map(|it| it.rsplit(' ').next()?.parse::<f64>().ok()).sum()
    };
    let queue = |state: &str| sum(&format!("rouse_controller_kube_queue{{state=\"{state}\"}}"));
    Ok(json!({
        "waits": queue("waiting") + queue("writing") + queue("later"),
        "leads": sum("rouse_controller_kube_leader"),
        "steps": sum("rouse_controller_step_seconds_count"),
    }))
}

/// Process of the controller, which is killed when this value is dropped.
struct ControllerProcess {
    child: Child,
    started: Instant,
    folder: PathBuf,
}

impl ControllerProcess {
    fn start(api: SocketAddr, listen: &str, admin: SocketAddr) -> Result<Self, ResyncBenchError> {
        let folder = env::temp_dir().join(format!("rouse-resync-{}", std::process::id()));
        fs::create_dir_all(&folder)?;
        let kubeconfig = folder.join("kubeconfig");
        fs::write(&kubeconfig, kubeconfig_of(api).to_string())?;
        let mut command = Command::new(env::current_exe()?);
        command.arg("controller").arg(&kubeconfig).args([listen, &admin.to_string()]);
        command.stdin(Stdio::piped());
        Ok(Self { started: Instant::now(), child: command.spawn()?, folder })
    }

    fn read_proc_file(&self, file: &str) -> Result<String, ResyncBenchError> {
        Ok(fs::read_to_string(Path::new("/proc").join(self.child.id().to_string()).join(file))?)
    }

    fn peak_mib(&self) -> Result<f64, ResyncBenchError> {
        let status = self.read_proc_file("status")?;
        let peak = status.lines().find_map(|it| it.strip_prefix("VmHWM:")?.strip_suffix("kB"));
        Ok(peak.unwrap_or_default().trim().parse::<f64>()? / 1024.0)
    }

    /// Returns the CPU time of user and kernel in seconds, read in hundredths: `USER_HZ` is 100 on every platform.
    fn cpu_s(&self) -> Result<f64, ResyncBenchError> {
        let stat = self.read_proc_file("stat")?;
        let (_, fields) = stat.rsplit_once(')').ok_or("no name in stat")?;
        let ticks = fields.split_whitespace().skip(11).take(2).map(str::parse::<f64>);
        Ok(ticks.sum::<Result<f64, _>>()? / 100.0)
    }
}

impl Drop for ControllerProcess {
    fn drop(&mut self) {
        // The process may have ended by itself; then the bench has failed already.
        let _ = self.child.kill();
        let _ = self.child.wait();
        let _ = fs::remove_dir_all(&self.folder);
    }
}

fn kubeconfig_of(api: SocketAddr) -> Value {
    json!({
        "apiVersion": "v1", "kind": "Config", "current-context": "bench",
        "clusters": [{"name": "bench", "cluster": {"server": format!("http://{api}")}}],
        "users": [{"name": "bench", "user": {}}],
        "contexts": [{"name": "bench", "context": {"cluster": "bench", "user": "bench"}}],
    })
}

/// Returns a local address with a free port.
fn free_port() -> std::io::Result<SocketAddr> {
    std::net::TcpListener::bind(("127.0.0.1", 0))?.local_addr()
}
