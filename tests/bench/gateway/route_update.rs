//! Shell: change of one host of ten thousand, for which the controller sends its whole table on a new stream.

use std::{
    io::{Read as _, Write as _},
    net::{SocketAddr, TcpStream},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, bail, ensure};
use common::{
    fixtures,
    wire::{ConnectionPath, NamespacedName, RevisionEntry, RouteChange, RouteTarget, ServiceEntry},
};
use tokio::{runtime::Runtime, sync::watch};

use crate::{
    cases::{AWAKE_HOST, GatewaySubject},
    crowd::within,
    figures::Figure,
    fixture::{GatewayFixture, GatewayProcess},
    http1::{get_request, parse_response},
    open_loop::OpenLoop,
    played_controller::ready_pod,
    pods::CountingPod,
    process::pause,
};

/// Number of services, each with one host.
const SERVICES: u16 = 10_000;
/// Number of the service that changes.
const CHANGED: u16 = 4_711;
/// Rate and connections of the normal requests, to another service.
const NORMAL_PER_S: f64 = 2_000.0;
const NORMAL_CONNECTIONS: usize = 16;
/// Length of the quiet run, and of the run with the change in its middle.
const RUN_TIME: Duration = Duration::from_secs(4);
/// Bodies of the responses before and after the change.
const BODIES: [&str; 2] = ["before", "after!"];
/// Timeout of the change.
const CHANGE_TIMEOUT: Duration = Duration::from_secs(30);
/// Timeout of one response to the client that looks for the change.
const RESPONSE_TIMEOUT: Duration = Duration::from_secs(10);

/// Measures a new process of an activator.
pub(crate) fn measure_route_update(
    fixture: &GatewayFixture,
    subject: GatewaySubject,
) -> Result<Vec<Figure>> {
    let proxy = fixture.start_proxy(subject)?;
    let pods: Vec<CountingPod> = {
        let _inside = fixture.runtime.enter();
        BODIES.into_iter().map(CountingPod::start).collect::<Result<_>>()?
    };
    let changed = add_services(fixture, &proxy, &pods)?;
    let normal = OpenLoop {
        to: proxy.h1_address(),
        host: AWAKE_HOST,
        connections: NORMAL_CONNECTIONS,
        per_s: NORMAL_PER_S,
        length: RUN_TIME,
    };
    let host = changed.hosts.first().context("the service has a host")?.clone();
    // The second client runs in the quiet run as well: it takes time of the same core.
    let prober = RouteProber::start(proxy.h1_address(), host);
    let quiet = normal.run()?;
    let runtime = &fixture.runtime;
    let (beside, end, sent) = thread::scope(|scope| -> Result<_> {
        let change = scope.spawn(|| {
            pause(RUN_TIME / 2);
            change_service(runtime, &proxy, changed)
        });
        let (beside, end) = (normal.run(), Instant::now());
        let sent = change.join().map_err(|_panic| anyhow::anyhow!("the change panicked"))?;
        Ok((beside?, end, sent?))
    })?;
    let seen = prober.join()?;
    // Otherwise the normal requests would show nothing of the change.
    ensure!(seen < end, "the change came after the last of the normal requests");
    let visible = seen.checked_duration_since(sent).context("the change was seen too early")?;
    Ok(vec![
        ("visible_ms", visible.as_secs_f64() * 1e3),
        ("max_ratio", beside.max_us() / quiet.p99_us()),
        ("quiet_max_ratio", quiet.max_us() / quiet.p99_us()),
    ])
}

/// Adds all services. Returns the one to change, as it will be: its second Revision then has all traffic.
fn add_services(
    fixture: &GatewayFixture,
    proxy: &GatewayProcess,
    pods: &[CountingPod],
) -> Result<ServiceEntry> {
    let controller = proxy.activator_controller()?;
    for number in (0..SERVICES).filter(|number| *number != CHANGED) {
        let (service, revision) = fixtures::sleeping_service(number);
        controller.set([RouteChange::Revision(revision), RouteChange::Service(service)]);
    }
    let (service, first) = fixtures::sleeping_service(CHANGED);
    let service = ServiceEntry { connection_path: ConnectionPath::Activator, ..service };
    let second_name = format!("{}-00002", service.name.name);
    let second_name = NamespacedName::new(service.name.namespace.clone(), second_name);
    let second = RevisionEntry { name: second_name, ..first.clone() };
    let target = RouteTarget { revision: second.name.clone(), percent: 100 };
    let changed = ServiceEntry { targets: vec![target], ..service.clone() };
    let pods = [&first, &second].into_iter().zip(["first", "second"]).zip(pods);
    let pods: Vec<RouteChange> =
        pods.map(|((revision, uid), pod)| ready_pod(uid, &revision.name, pod.address)).collect();
    controller.set([RouteChange::Revision(first), RouteChange::Revision(second)]);
    controller.set([RouteChange::Service(service)]);
    controller.set(pods);
    fixture.runtime.block_on(controller.wait_in_force())?;
    Ok(changed)
}

/// Changes the service. Returns the moment at which the controller had sent its whole table.
fn change_service(
    runtime: &Runtime,
    proxy: &GatewayProcess,
    changed: ServiceEntry,
) -> Result<Instant> {
    let controller = proxy.activator_controller()?;
    let sent = controller.change_by_new_stream([RouteChange::Service(changed)]);
    runtime.block_on(wait_for_moment(sent))
}

async fn wait_for_moment(mut moment: watch::Receiver<Option<Instant>>) -> Result<Instant> {
    let set = within(CHANGE_TIMEOUT, moment.wait_for(Option::is_some)).await;
    let set = set.context("the activator opens no new stream")?.context("the controller ended")?;
    (*set).context("a moment was set")
}

/// Client on a thread of its own, which sends requests to the changed host until the new Revision answers.
struct RouteProber {
    thread: thread::JoinHandle<Result<Instant>>,
    stop: Arc<AtomicBool>,
}

impl RouteProber {
    fn start(to: SocketAddr, host: String) -> Self {
        let stop = Arc::new(AtomicBool::new(false));
        let is_stopped = Arc::clone(&stop);
        Self { thread: thread::spawn(move || probe_until_changed(to, &host, &is_stopped)), stop }
    }

    /// Returns the moment of the first response of the new Revision, which has to come soon.
    fn join(self) -> Result<Instant> {
        let until = Instant::now() + CHANGE_TIMEOUT;
        while !self.thread.is_finished() && Instant::now() < until {
            pause(Duration::from_millis(10));
        }
        self.stop.store(true, Ordering::Relaxed);
        self.thread.join().map_err(|_panic| anyhow::anyhow!("the client panicked"))?
    }
}

/// Sends one request after the other until the new Revision answers. Returns the moment of its response.
fn probe_until_changed(to: SocketAddr, host: &str, stop: &AtomicBool) -> Result<Instant> {
    let request = get_request(host);
    let mut stream = TcpStream::connect(to).context("cannot connect to the activator")?;
    stream.set_nodelay(true)?;
    stream.set_read_timeout(Some(RESPONSE_TIMEOUT))?;
    while !stop.load(Ordering::Relaxed) {
        stream.write_all(&request).context("cannot send a request")?;
        if read_body(&mut stream)? == BODIES[1].as_bytes() {
            return Ok(Instant::now());
        }
    }
    bail!("the old Revision still answers")
}

fn read_body(stream: &mut TcpStream) -> Result<Vec<u8>> {
    let mut received = Vec::with_capacity(512);
    let mut buffer = [0_u8; 4096];
    loop {
        let length = stream.read(&mut buffer).context("cannot read a response")?;
        if length == 0 {
            bail!("the activator closed the connection");
        }
        received.extend_from_slice(&buffer[..length]);
        if let Some(response) = parse_response(&received)? {
            return Ok(received[response.body_start..response.length].to_vec());
        }
    }
}
