//! Shell: leader election: acquires and renews the Lease, and publishes the time until which this replica may write.

use std::{
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use futures::{StreamExt as _, TryStreamExt as _};
use k8s_openapi::{
    api::coordination::v1::{Lease as LeaseObject, LeaseSpec},
    apimachinery::pkg::apis::meta::v1::{MicroTime, ObjectMeta},
    jiff::Timestamp,
};
use kube::{
    Api, Client,
    api::PostParams,
    runtime::{WatchStreamExt as _, watcher},
};
use tokio::{
    sync::watch,
    time::{Instant, sleep, timeout},
};
use tokio_util::sync::CancellationToken;
use tracing::{info, warn};
use watches::watch_events;

use super::{
    lease_state::{LeaseAction, LeaseRecord, LeaseState, LeaseTiming, MonotonicTime},
    watches::MAX_PAUSE,
};

/// Name of the controller's Lease.
pub const LEASE: &str = "rouse-controller";

/// Permission to write, shared by all tasks of this replica.
#[derive(Clone, Debug)]
pub struct Leadership {
    started_at: Instant,
    valid_until: watch::Receiver<Option<MonotonicTime>>,
}

impl Leadership {
    /// Returns true if a write may begin now.
    pub fn may_write(&self) -> bool {
        let now = self.started_at.elapsed();
        self.valid_until.borrow().is_some_and(|end| now < end)
    }

    /// Waits until the permission may have changed, by an update or by time.
    pub async fn changed(&mut self) {
        let left = self
            .valid_until
            .borrow_and_update()
            .map(|end| end.saturating_sub(self.started_at.elapsed()));
        let lapse = async {
            match left.filter(|left| !left.is_zero()) {
                Some(left) => sleep(left).await,
                None => std::future::pending().await,
            }
        };
        tokio::select! {
            // If the sender is gone, the permission ends by time.
            Ok(()) = self.valid_until.changed() => {}
            () = lapse => {}
        }
    }

    /// Returns a permission without end, for a single controller, as in tests.
    pub fn permanent() -> Self {
        let (_, valid_until) = watch::channel(Some(MonotonicTime::MAX));
        Self { started_at: Instant::now(), valid_until }
    }
}

/// Leader elector: one replica that competes for the Lease.
#[derive(Debug)]
pub struct LeaderElector {
    api: Api<LeaseObject>,
    lease: Arc<Mutex<LeaseState>>,
    identity: String,
    timing: LeaseTiming,
    started_at: Instant,
    valid_until: watch::Sender<Option<MonotonicTime>>,
    /// Time at which this replica acquired the Lease, for the Lease's `acquireTime`.
    acquired_at: Mutex<Timestamp>,
}

impl LeaderElector {
    /// Returns an elector with the identity `me`, for the Lease in `namespace`.
    pub fn new(client: Client, namespace: &str, me: &str, timing: LeaseTiming) -> Self {
        Self {
            api: Api::namespaced(client, namespace),
            lease: Arc::new(Mutex::new(LeaseState::new(me, timing))),
            identity: me.into(),
            timing,
            started_at: Instant::now(),
            valid_until: watch::channel(None).0,
            acquired_at: Mutex::default(),
        }
    }

    /// Returns the permission to write, which follows the Lease.
    pub fn leadership(&self) -> Leadership {
        Leadership { started_at: self.started_at, valid_until: self.valid_until.subscribe() }
    }

    /// Competes for the Lease until `shutdown`, then releases it.
    pub async fn run(self, shutdown: CancellationToken) {
        let config = watcher::Config::default().fields(&format!("metadata.name={LEASE}"));
        // The watch reports a release at once; without it, the next attempt would notice.
        let changes = watch_events(self.api.clone(), config, MAX_PAUSE).touched_objects();
        let mut changes = std::pin::pin!(changes.map_ok(|it| self.is_free(&it)).fuse());
        loop {
            self.attempt_lease().await;
            let mut next = std::pin::pin!(sleep(self.timing.retry_period));
            loop {
                tokio::select! {
                    () = &mut next => break,
                    free = changes.next() => if matches!(free, Some(Ok(true))) { break },
                    () = shutdown.cancelled() => return self.release().await,
                }
            }
        }
    }

    fn is_free(&self, lease: &LeaseObject) -> bool {
        let holder = lease.spec.as_ref().and_then(|it| it.holder_identity.as_deref());
        // The watch also reports our own writes, which must not cause another attempt.
        holder.unwrap_or_default().is_empty()
            && !self.with_lease(|it| it.may_write(self.started_at.elapsed()))
    }

    fn with_lease<T>(&self, update: impl FnOnce(&mut LeaseState) -> T) -> T {
        update(&mut self.lease.lock().unwrap_or_else(PoisonError::into_inner))
    }

    async fn attempt_lease(&self) {
        let led = self.with_lease(|it| it.may_write(self.started_at.elapsed()));
        let tried = timeout(self.timing.renew_deadline, self.acquire_or_renew()).await;
        match tried {
            Ok(Ok(())) => {}
            Ok(Err(error)) => warn!(error = %error, "cannot use the lease"),
            Err(_elapsed) => warn!("the lease does not answer"),
        }
        let is_leader = self.with_lease(|it| it.may_write(self.started_at.elapsed()));
        // The permission is published even after an error: its end may have passed meanwhile.
        self.valid_until.send_replace(self.with_lease(|it| it.valid_until()));
        if led != is_leader {
            info!(lease = LEASE, holder = self.identity, leads = is_leader, "leadership changed");
        }
    }

    /// Writes the Lease if this replica holds it or may take it. Losing to another replica is no error.
    async fn acquire_or_renew(&self) -> Result<(), kube::Error> {
        // A holder renews without reading: if another replica wrote meanwhile, the version does not match.
        let version = match self.with_lease(|it| it.held_version()) {
            Some(version) => Some(version),
            None => {
                let lease = self.api.get_opt(LEASE).await?;
                let now = self.started_at.elapsed();
                match self.with_lease(|it| it.handle_read(lease.as_ref().map(to_lease_record), now))
                {
                    LeaseAction::Wait => return Ok(()),
                    LeaseAction::Acquire(version) => {
                        *self.acquired_at.lock().unwrap_or_else(PoisonError::into_inner) =
                            Timestamp::now();
                        version
                    }
                }
            }
        };
        // The time before the request: the API server may have stored the renewal that early.
        let began = self.started_at.elapsed();
        let body = self.lease_object(version.clone(), &self.identity);
        let params = PostParams {
            field_manager: Some(crate::model::object::FIELD_MANAGER.into()),
            dry_run: false,
        };
        let written = match version {
            Some(_) => self.api.replace(LEASE, &params, &body).await,
            None => self.api.create(&params, &body).await,
        };
        match written {
            Ok(lease) => {
                let version = lease.metadata.resource_version.unwrap_or_default();
                self.with_lease(|it| it.handle_written(version, began, self.started_at.elapsed()));
                Ok(())
            }
            Err(kube::Error::Api(status)) if matches!(status.code, 404 | 409) => {
                // Another replica wrote first, or the Lease was deleted: the next attempt reads it.
                self.with_lease(LeaseState::handle_conflict);
                Ok(())
            }
            Err(error) => Err(error),
        }
    }

    async fn release(&self) {
        // Stop writing before the release, or another leader could write at the same time.
        self.valid_until.send_replace(None);
        let Some(version) = self.with_lease(LeaseState::release) else { return };
        let body = self.lease_object(Some(version), "");
        let params = PostParams {
            field_manager: Some(crate::model::object::FIELD_MANAGER.into()),
            dry_run: false,
        };
        match timeout(self.timing.renew_deadline, self.api.replace(LEASE, &params, &body)).await {
            Ok(Ok(_)) => info!(lease = LEASE, holder = self.identity, "lease released"),
            Ok(Err(error)) => warn!(error = %error, "cannot release the lease: the next one waits"),
            Err(_elapsed) => warn!("cannot release the lease in time: the next one waits"),
        }
    }

    fn lease_object(&self, version: Option<String>, holder: &str) -> LeaseObject {
        let acquired = *self.acquired_at.lock().unwrap_or_else(PoisonError::into_inner);
        LeaseObject {
            metadata: ObjectMeta {
                name: Some(LEASE.into()),
                resource_version: version,
                ..ObjectMeta::default()
            },
            spec: Some(LeaseSpec {
                holder_identity: Some(holder.into()),
                lease_duration_seconds: Some(self.timing.lease_duration_seconds()),
                renew_time: Some(MicroTime(Timestamp::now())),
                acquire_time: Some(MicroTime(acquired)),
                ..LeaseSpec::default()
            }),
        }
    }
}

fn to_lease_record(lease: &LeaseObject) -> LeaseRecord {
    let spec = lease.spec.as_ref();
    let holder = spec.and_then(|it| it.holder_identity.clone());
    let seconds = spec.and_then(|it| it.lease_duration_seconds).map(u64::try_from);
    LeaseRecord {
        resource_version: lease.metadata.resource_version.clone().unwrap_or_default(),
        holder: holder.unwrap_or_default(),
        lease_duration: Duration::from_secs(seconds.and_then(Result::ok).unwrap_or_default()),
    }
}
