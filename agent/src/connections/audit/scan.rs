//! Shell: scans the sockets in pods' namespaces and corrects gauges that have drifted, in a task of its own.

use std::{io, time::Duration};

use common::link::error_chain;
use datapath::abi;
use tokio::{sync::mpsc::Sender, task::spawn_blocking, time::sleep};
use tokio_util::sync::CancellationToken;
use tracing::{debug, warn};

use super::{AuditScan, GaugeAudit, SocketShare};
use crate::{
    clock::{monotonic_ns, thread_cpu_time},
    kernel::maps::{connection_storage::ConnectionStorage, gauges::PodGauges},
    metrics::AgentMetrics,
    net::sockdiag::SockDiag,
    pod_gauge::{GaugeValues, PodGauge},
    pods::{
        finder::{FinderCommand, request_namespace},
        registry::{CountedPods, RegisteredPod},
    },
};

/// Period in which the audit looks for pods that are due.
const DUE_CHECK_PERIOD: Duration = Duration::from_secs(1);

/// Task that audits the gauges of the registered pods.
pub(crate) struct GaugeAuditor {
    pub(crate) targets: CountedPods,
    pub(crate) finder_commands: Sender<FinderCommand>,
    pub(crate) conns: ConnectionStorage,
    pub(crate) gauges: PodGauges,
    pub(crate) metrics: AgentMetrics,
}

impl GaugeAuditor {
    /// Scans due pods until `shutdown`.
    pub(crate) async fn run(self, shutdown: CancellationToken) {
        let mut audit = GaugeAudit::default();
        loop {
            tokio::select! {
                () = shutdown.cancelled() => return,
                () = sleep(DUE_CHECK_PERIOD) => self.scan_due(&mut audit).await,
            }
        }
    }

    async fn scan_due(&self, audit: &mut GaugeAudit) {
        // Copied: scans take long, and a registration must not wait for them.
        let pods = self.targets.all();
        let values = |pod: &RegisteredPod| self.gauges.values(pod.entry.slot);
        let all = pods.iter().map(|(uid, pod)| (uid.clone(), values(pod))).collect();
        audit.set_pods(monotonic_ns(), &all);
        for uid in audit.due_pods(monotonic_ns()) {
            let Some(pod) = pods.get(&uid) else { continue };
            let scan = self.scan_pod(&uid, pod.clone()).await;
            let verdict = audit.handle_scan(monotonic_ns(), &uid, scan.as_ref());
            self.metrics.count_audit(match scan {
                None => "failed",
                Some(_) if verdict.is_steady => "still",
                Some(_) => "moved",
            });
            if verdict.correction != GaugeValues::default() {
                self.correct(&uid, pod, verdict.correction);
            }
        }
        self.metrics.uncounted.set(i64::try_from(audit.uncounted()).unwrap_or(i64::MAX));
    }

    /// Adds a correction to a pod's gauges, unless the pod is gone meanwhile.
    fn correct(&self, uid: &str, pod: &RegisteredPod, add: GaugeValues) {
        if !self.targets.if_counted(uid, pod, || self.gauges.add(pod.entry.slot, add)) {
            return;
        }
        for (gauge, by) in PodGauge::ALL.into_iter().zip(add).filter(|(_, by)| *by != 0) {
            warn!(
                uid,
                gauge = gauge.name(),
                by,
                "gauge had drifted from the pod's sockets: put right"
            );
            self.metrics.add_drift(gauge, by.unsigned_abs());
        }
    }

    /// Scans a pod. Returns `None` if the scan failed.
    async fn scan_pod(&self, uid: &str, pod: RegisteredPod) -> Option<AuditScan> {
        let namespace = request_namespace(&self.finder_commands, uid, pod.cookie).await?;
        let (conns, gauges) = (self.conns.clone(), self.gauges.clone());
        let job = move || {
            namespace.run_inside("list connections", || scan_namespace(&pod, &conns, &gauges))
        };
        match spawn_blocking(job).await {
            Ok(Ok(scan)) => Some(scan),
            Ok(Err(error)) => {
                debug!(uid, error = %error_chain(&error), "cannot compare gauges with sockets");
                None
            }
            Err(panic) => std::panic::resume_unwind(panic.into_panic()),
        }
    }
}

/// Returns the share of a connection in the gauges.
fn socket_share(conn: &abi::ServerSocket) -> SocketShare {
    SocketShare {
        in_flight: conn.http.requests_in_flight,
        is_fresh: conn.http.flags & abi::HTTP_AWAITS_FIRST_REQUEST != 0,
        is_estimated: conn.http.protocol == abi::PROTOCOL_OPAQUE,
    }
}

/// Scans the network namespace of the calling thread.
fn scan_namespace(
    pod: &RegisteredPod,
    conns: &ConnectionStorage,
    gauges: &PodGauges,
) -> io::Result<AuditScan> {
    let diag = SockDiag::open()?;
    let mut scan = AuditScan::default();
    scan.readings[0] = gauges.read(pod.entry.slot);
    for at in 0..scan.sockets.len() {
        // Only the second list's uncounted connections are reported: it is the later one.
        scan.uncounted.clear();
        for (connection, remembered) in conns.all_connections(&diag)? {
            // An entry alone proves nothing: it may count for another row, or for none.
            let counted = remembered.filter(|it| it.is_counted(pod.entry.slot));
            let (cookie, local) = (connection.cookie(), connection.canonical_local());
            if let Some(conn) = counted {
                scan.sockets[at].insert(cookie, socket_share(&conn));
            } else if pod.ports.is_counted(local.port())
                && !connection.canonical_peer().ip().is_loopback()
            {
                scan.uncounted.insert(cookie);
            }
        }
        scan.readings[at + 1] = gauges.read(pod.entry.slot);
    }
    scan.cpu_time = thread_cpu_time();
    Ok(scan)
}
