//! Shell: scans the sockets in pods' namespaces and corrects gauges that have drifted, in a task of its own.

use std::{
    collections::BTreeMap,
    io,
    sync::{Arc, Mutex},
    time::Duration,
};

use common::{abi, link::chain};
use tokio::{sync::mpsc::Sender, task::spawn_blocking, time::sleep};
use tokio_util::sync::CancellationToken;
use tracing::{debug, warn};

use super::{Audit, Counts, Gauge, Levels, Look};
use crate::{
    admin::Metrics,
    clock::{monotonic_ns, thread_cpu},
    lock,
    maps::{conns::Conns, gauges::Gauges},
    pods::find::{Command, borrow},
    sockdiag::SockDiag,
};

/// Period in which the audit looks for pods that are due.
const TICK: Duration = Duration::from_secs(1);

/// Pods that the eBPF programs count for. Cheap to clone; all clones share the pods.
#[derive(Clone, Debug, Default)]
pub(crate) struct Registered(Arc<Mutex<BTreeMap<String, Pod>>>);

/// One registered pod, as the audit needs it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Pod {
    /// Cookie of the pod's namespace.
    pub(crate) cookie: u64,
    /// Row and serving port of the pod.
    pub(crate) pod: abi::Pod,
}

impl Registered {
    pub(crate) fn add(&self, uid: &str, pod: Pod) {
        lock(&self.0).insert(uid.to_owned(), pod);
    }

    /// Removes a pod. After this no correction is added to its gauges, so its row may become another pod's.
    pub(crate) fn remove(&self, uid: &str) {
        lock(&self.0).remove(uid);
    }
}

/// Task that audits the gauges of the registered pods.
pub(crate) struct Auditor {
    pub(crate) registered: Registered,
    pub(crate) finder: Sender<Command>,
    pub(crate) conns: Conns,
    pub(crate) gauges: Gauges,
    pub(crate) metrics: Metrics,
}

impl Auditor {
    /// Scans due pods until `shutdown`.
    pub(crate) async fn run(self, shutdown: CancellationToken) {
        let mut audit = Audit::default();
        loop {
            tokio::select! {
                () = shutdown.cancelled() => return,
                () = sleep(TICK) => self.round(&mut audit).await,
            }
        }
    }

    async fn round(&self, audit: &mut Audit) {
        // Copied: scans take long, and a registration must not wait for them.
        let pods = lock(&self.registered.0).clone();
        let levels = |pod: &Pod| self.gauges.levels(pod.pod.slot);
        let all = pods.iter().map(|(uid, pod)| (uid.clone(), levels(pod))).collect();
        audit.follow(monotonic_ns(), &all);
        for uid in audit.due(monotonic_ns()) {
            let Some(&pod) = pods.get(&uid) else { continue };
            let look = self.look(&uid, pod).await;
            let verdict = audit.looked(monotonic_ns(), &uid, look.as_ref());
            self.metrics.audited(match look {
                None => "failed",
                Some(_) if verdict.stood => "still",
                Some(_) => "moved",
            });
            if verdict.add != Levels::default() {
                self.correct(&uid, pod, verdict.add);
            }
        }
        self.metrics.uncounted.set(i64::try_from(audit.uncounted()).unwrap_or(i64::MAX));
    }

    /// Adds a correction to a pod's gauges, unless the pod is gone meanwhile.
    fn correct(&self, uid: &str, pod: Pod, add: Levels) {
        // Held over the addition: `remove` waits for it, and only then is the row released.
        let registered = lock(&self.registered.0);
        if registered.get(uid) != Some(&pod) {
            return;
        }
        self.gauges.add(pod.pod.slot, add);
        drop(registered);
        for (gauge, by) in Gauge::ALL.into_iter().zip(add).filter(|(_, by)| *by != 0) {
            warn!(
                uid,
                gauge = gauge.name(),
                by,
                "gauge had drifted from the pod's sockets: put right"
            );
            self.metrics.drifted(gauge, by.unsigned_abs());
        }
    }

    /// Scans a pod. Returns `None` if the scan failed.
    async fn look(&self, uid: &str, pod: Pod) -> Option<Look> {
        let namespace = borrow(&self.finder, uid, pod.cookie).await?;
        let (conns, gauges) = (self.conns.clone(), self.gauges.clone());
        let job = move || namespace.within("connections", || look_here(pod, &conns, &gauges));
        match spawn_blocking(job).await {
            Ok(Ok(look)) => Some(look),
            Ok(Err(error)) => {
                debug!(uid, error = %chain(&error), "cannot compare gauges with sockets");
                None
            }
            Err(panic) => std::panic::resume_unwind(panic.into_panic()),
        }
    }
}

/// Returns the share of a connection in the gauges.
fn counts(conn: &abi::Conn) -> Counts {
    Counts {
        in_flight: conn.http.open,
        is_fresh: conn.http.flags & abi::HTTP_FRESH != 0,
        is_estimated: conn.http.speaks == abi::SPEAKS_OTHER,
    }
}

/// Scans the network namespace of the calling thread.
fn look_here(pod: Pod, conns: &Conns, gauges: &Gauges) -> io::Result<Look> {
    let diag = SockDiag::open()?;
    let mut look = Look::default();
    look.readings[0] = gauges.read(pod.pod.slot);
    for at in 0..look.sockets.len() {
        // Only the second list's uncounted connections are reported: it is the later one.
        look.uncounted.clear();
        for (connection, remembered) in conns.all(&diag)? {
            // An entry alone proves nothing: it may count for another row, or for none.
            let counted = remembered.filter(|it| it.is_counted(pod.pod.slot));
            let (cookie, own) = (connection.cookie(), connection.plain_local());
            if let Some(conn) = counted {
                look.sockets[at].insert(cookie, counts(&conn));
            } else if own.port() == pod.pod.port && !connection.plain_peer().ip().is_loopback() {
                look.uncounted.insert(cookie);
            }
        }
        look.readings[at + 1] = gauges.read(pod.pod.slot);
    }
    look.took = thread_cpu();
    Ok(look)
}
