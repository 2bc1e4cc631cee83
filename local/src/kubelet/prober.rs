//! Shell: runs the probes of containers, as the kubelet does, and stops the containers that fail them.
//!
//! A startup probe comes first; liveness and readiness probes then run until the container ends. Where the agent's own
//! readiness probe covers the whole pod, the readiness probe is left to it: see [`LocalPodSpec::kubelet_probes`].
//!
//! [`LocalPodSpec::kubelet_probes`]: common::local_node::LocalPodSpec::kubelet_probes

use std::convert::Infallible;
use std::future::pending;
use std::io;
use std::net::{IpAddr, Ipv4Addr, SocketAddr, SocketAddrV4, TcpStream as StdStream};
use std::os::fd::{AsFd as _, AsRawFd as _, OwnedFd};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use common::probe::{self, ProbeConnector};
use nix::sys::socket::{AddressFamily, SockFlag, SockType, SockaddrIn, bind, socket};
use tokio::net::{TcpSocket, TcpStream};
use tokio::sync::mpsc;
use tokio::time::{sleep, timeout};
use tracing::{info, warn};

use super::probe_spec::{ContainerProbes, ProbeAction, ProbeSpec, ProbeStreak};
use super::{EventResource, KubeletResources, PodEventReport, PreparedPod, lifecycle, stop_signal};
use crate::pods::{PodEvent, ProbeResults};
use crate::runtime::ExecRequest;
use crate::{net, sys};

/// Seconds to end after a failed probe, for containers whose pod and probe give no time: Kubernetes' default.
const DEFAULT_GRACE_PERIOD_S: i64 = 30;

/// One run of a container, from its start to its exit.
pub(super) struct ContainerRun {
    pub(super) index: usize,
    /// Number of restarts before this run.
    pub(super) restarts: u32,
    pub(super) pidfd: Arc<OwnedFd>,
    pub(super) addresses: Vec<IpAddr>,
    /// Probe results that an earlier node process recorded for this run.
    pub(super) results: ProbeResults,
}

/// Probes one run of a container until its process has ended; stops it when startup or liveness probe fails.
pub(super) async fn probe_container(
    resources: Arc<KubeletResources>,
    prepared: Arc<PreparedPod>,
    reports: mpsc::Sender<PodEventReport>,
    run: ContainerRun,
) {
    let started_at = Instant::now();
    let (pod_spec, container) = (&prepared.pod_spec, &prepared.containers[run.index]);
    let pod = &pod_spec.name;
    let probes = match ContainerProbes::from_container(container, pod_spec.kubelet_probes) {
        Ok(probes) => probes,
        // As on Kubernetes, such a container counts as not started or not ready, and is never stopped for it.
        Err(error) => {
            return warn!(pod, container = container.name, trouble = error, "cannot probe");
        }
    };
    if probes == ContainerProbes::default() {
        return;
    }
    // Probes connect from 127.0.0.1, so they need an IPv4 address.
    let Some(ip) = run.addresses.iter().copied().find(IpAddr::is_ipv4) else { return };
    // tokio registers a descriptor only once, and the task that reports the exit has registered this one.
    let watched = run.pidfd.try_clone().and_then(|pidfd| sys::watch_readable(Arc::new(pidfd)));
    let watched = match watched {
        Ok(watched) => watched,
        Err(error) => return warn!(pod, %error, "container not probed"),
    };
    let prober = ContainerProber {
        shared: &resources,
        prepared: &prepared,
        reports,
        run: &run,
        ip,
        started_at,
    };
    let failed = tokio::select! {
        _ended = watched.readable() => return,
        failed = prober.run_probes(&probes) => failed,
    };
    // Not ready before the stop signal: requests go elsewhere while the container stops.
    prober.report_results(ProbeResults::default()).await;
    let grace = prober.terminate_container(&failed);
    if timeout(grace, watched.readable()).await.is_err() {
        let (uid, container) = (&prepared.pod_spec.uid, &container.name);
        warn!(pod, uid, container, "killed after its grace period");
        resources.cgroups.kill_container(&resources.layout, uid, container);
    }
}

/// Probe whose failure restarts a container.
struct ProbeFailure<'a> {
    kind: &'static str,
    spec: &'a ProbeSpec,
    error: String,
}

/// Runs the probes of one run of a container.
struct ContainerProber<'a> {
    shared: &'a Arc<KubeletResources>,
    prepared: &'a Arc<PreparedPod>,
    reports: mpsc::Sender<PodEventReport>,
    run: &'a ContainerRun,
    ip: IpAddr,
    started_at: Instant,
}

impl ContainerProber<'_> {
    /// Runs the probes until the startup or the liveness probe has failed.
    async fn run_probes<'a>(&self, probes: &'a ContainerProbes) -> ProbeFailure<'a> {
        let mut results = self.run.results;
        // A startup probe that an earlier node process saw pass is not run again.
        if let Some(spec) = probes.startup.as_ref().filter(|_| !results.started)
            && let Err(error) = ProbeWorker::new(self, spec).next_outcome().await
        {
            return ProbeFailure { kind: "startup", spec, error };
        }
        results =
            ProbeResults { started: true, ready: results.ready || probes.readiness.is_none() };
        self.report_results(results).await;
        tokio::select! {
            failed = self.watch_liveness(probes.liveness.as_ref()) => failed,
            never = self.watch_readiness(probes.readiness.as_ref(), results) => match never {},
        }
    }

    /// Runs the liveness probe until it has failed; without one, waits forever.
    async fn watch_liveness<'a>(&self, spec: Option<&'a ProbeSpec>) -> ProbeFailure<'a> {
        let Some(spec) = spec else { return pending().await };
        let mut worker = ProbeWorker::new(self, spec);
        loop {
            if let Err(error) = worker.next_outcome().await {
                return ProbeFailure { kind: "liveness", spec, error };
            }
        }
    }

    /// Runs the readiness probe and reports each change; never returns.
    async fn watch_readiness(
        &self,
        spec: Option<&ProbeSpec>,
        mut results: ProbeResults,
    ) -> Infallible {
        let Some(spec) = spec else { return pending().await };
        let mut worker = ProbeWorker::new(self, spec);
        loop {
            let outcome = worker.next_outcome().await;
            // Only changes are reported.
            if outcome.is_ok() == results.ready {
                continue;
            }
            results.ready = outcome.is_ok();
            let error = outcome.err().unwrap_or_default();
            let (pod, container) = (&self.prepared.pod_spec.name, self.container_name());
            info!(pod, container, ready = results.ready, trouble = error, "readiness probed");
            self.report_results(results).await;
        }
    }

    fn container_name(&self) -> &str {
        &self.prepared.containers[self.run.index].name
    }

    /// Reports probe results to the kubelet.
    async fn report_results(&self, results: ProbeResults) {
        let uid = self.prepared.pod_spec.uid.clone();
        let (index, restarts) = (self.run.index, self.run.restarts);
        let event = PodEvent::ProbesChanged { index, restarts, results };
        // The channel is closed once the kubelet has ended; the report is not needed then.
        let _ =
            self.reports.send(PodEventReport { uid, event, resource: EventResource::None }).await;
    }

    /// Sends the container its stop signal and returns the time that it has to end.
    fn terminate_container(&self, failed: &ProbeFailure<'_>) -> Duration {
        let ProbeFailure { kind, spec, error } = failed;
        let (pod, uid, name) =
            (&self.prepared.pod_spec.name, &self.prepared.pod_spec.uid, self.container_name());
        info!(pod, uid, container = name, kind, trouble = error, "container restarted");
        let bundle = self.shared.layout.bundle(uid, name);
        let message_file = bundle.join("termination-log");
        // The status shows this file as the termination message; without it, only the detail is missing.
        let _ = std::fs::write(message_file, format!("{kind} probe failed: {error}"));
        stop_signal::send_stop_signal(&bundle, self.run.pidfd.as_fd());
        let pod_grace = self.prepared.pod_spec.spec.termination_grace_period_seconds;
        let grace = spec.grace_period_s.or(pod_grace).unwrap_or(DEFAULT_GRACE_PERIOD_S);
        Duration::from_secs(u64::try_from(grace).unwrap_or(0))
    }

    /// Runs one attempt of a probe; the error says why it failed.
    async fn run_attempt(&self, spec: &ProbeSpec) -> Result<(), String> {
        match &spec.action {
            ProbeAction::Exec(command) => self.run_exec_probe(command, spec.timeout).await,
            ProbeAction::Network { handler, port } => {
                let namespace = self.shared.layout.pod_namespace(&self.prepared.pod_spec.uid);
                let address = SocketAddr::new(self.ip, *port);
                probe::run_probe(
                    handler,
                    address,
                    spec.timeout,
                    &PodNamespaceConnector { namespace },
                )
                .await
            }
        }
    }

    /// Runs a probe's command inside the container.
    async fn run_exec_probe(&self, command: &[String], timeout: Duration) -> Result<(), String> {
        let (layout, uid) = (&self.shared.layout, &self.prepared.pod_spec.uid);
        let cgroup = self.shared.cgroups.open_container(layout, uid, self.container_name());
        let exec = ExecRequest {
            id: lifecycle::container_id(uid, self.container_name(), self.run.restarts),
            bundle: layout.bundle(uid, self.container_name()),
            command: command.to_vec(),
            cgroup: cgroup.map_err(|error| lifecycle::error_chain(&error))?,
        };
        let runtime = self.shared.runtime.clone();
        // A task of its own: a command that has begun ends at its time limit even if this future is dropped.
        let result = tokio::spawn(async move { runtime.exec(exec, timeout).await });
        let result = result.await.map_err(|_ended| "the node stops".to_owned())?;
        let result = result.map_err(|error| lifecycle::error_chain(&error))?;
        let command = command.join(" ");
        match result.code {
            Some(0) => Ok(()),
            Some(code) => Err(format!("{command:?} exited with {code}: {}", result.output.trim())),
            None => Err(format!("{command:?} did not end within {timeout:?}")),
        }
    }
}

/// Attempts of one probe.
struct ProbeWorker<'a> {
    prober: &'a ContainerProber<'a>,
    spec: &'a ProbeSpec,
    streak: ProbeStreak,
    /// Pause before the next attempt.
    pause: Duration,
}

impl<'a> ProbeWorker<'a> {
    fn new(prober: &'a ContainerProber<'a>, spec: &'a ProbeSpec) -> Self {
        let pause = spec.initial_delay.saturating_sub(prober.started_at.elapsed());
        Self { prober, spec, streak: ProbeStreak::default(), pause }
    }

    /// Runs attempts until enough equal results came in a row. The error is the newest attempt's.
    async fn next_outcome(&mut self) -> Result<(), String> {
        loop {
            sleep(self.pause).await;
            self.pause = self.spec.period;
            let result = self.prober.run_attempt(self.spec).await;
            if self.streak.record(self.spec, result.is_ok()).is_some() {
                return result;
            }
        }
    }
}

/// Connects from the pod's own loopback address: the eBPF programs do not count requests that come from there.
#[derive(Clone, Debug)]
struct PodNamespaceConnector {
    namespace: PathBuf,
}

impl ProbeConnector for PodNamespaceConnector {
    async fn connect(&self, address: SocketAddr, _: Duration) -> io::Result<TcpStream> {
        let make = || {
            let flags = SockFlag::SOCK_NONBLOCK | SockFlag::SOCK_CLOEXEC;
            let fd = socket(AddressFamily::Inet, SockType::Stream, flags, None)?;
            let local_address = SockaddrIn::from(SocketAddrV4::new(Ipv4Addr::LOCALHOST, 0));
            bind(fd.as_raw_fd(), &local_address)?;
            Ok::<_, nix::Error>(fd)
        };
        let namespace = net::open_namespace(&self.namespace).map_err(io::Error::other)?;
        let inside = move || {
            net::enter_namespace(namespace.as_fd()).map_err(io::Error::other)?;
            make().map_err(io::Error::from)
        };
        // A thread of its own: it ends with the job, so no other work runs in the pod's namespace.
        let result = tokio::task::spawn_blocking(|| std::thread::spawn(inside).join()).await;
        let panicked = || io::Error::other("the probe panicked");
        let fd = result.map_err(io::Error::other)?.ok().ok_or_else(panicked)??;
        TcpSocket::from_std_stream(StdStream::from(fd)).connect(address).await
    }
}
