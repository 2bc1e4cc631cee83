//! Shell: signs certificates for the names of services inside the cluster, with an authority of their own.
//!
//! Clients trust this authority for hosts. It is another one than that of the components, so trust in it admits no
//! client among these, and each has its own times of rotation. Keys exist in memory only: each replica signs its own
//! certificates, and activators get those of the replica that they follow.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
    time::{Duration, SystemTime},
};

use common::{
    link::error_chain,
    wire::{CertificateMaterial, NamespacedName, PrivateKeyBytes},
};
use tokio::time::{Instant, sleep_until};
use tokio_util::sync::CancellationToken;
use tracing::{info, warn};

use super::{
    authority_store::{
        AuthorityError, AuthorityStore, publish_stored, refresh_stored, unix_seconds,
    },
    local_schedule::LocalCertificateSchedule,
    refresh_rounds::{RefreshChange, RefreshRounds},
    rotation::LOCAL_SCHEDULE,
    signing::{CertificateSigner, SignError},
};
use crate::{
    decide::{machine::ControllerEvent, plan::local_tls::local_hosts},
    model::cluster_state::shorten_error,
    shell::runtime::ControllerRuntime,
};

/// Shortest interval between two rounds. Each walks over all services, of which many may be created one by one.
const MIN_ROUND_INTERVAL: Duration = Duration::from_millis(100);

/// The authority that signs now.
#[derive(Debug)]
struct LocalAuthority {
    signer: CertificateSigner,
    made_s: u64,
}

/// Signer of certificates for names inside the cluster.
#[derive(Debug)]
pub struct LocalCertificateSigner {
    store: Arc<dyn AuthorityStore>,
    runtime: Arc<ControllerRuntime>,
    cluster_domain: String,
    authority: Option<LocalAuthority>,
    schedule: LocalCertificateSchedule,
    rounds: RefreshRounds,
}

impl LocalCertificateSigner {
    /// Creates a signer for services of `runtime`, whose longest names end in `cluster_domain`.
    pub fn new(
        store: Arc<dyn AuthorityStore>,
        runtime: Arc<ControllerRuntime>,
        cluster_domain: &str,
    ) -> Self {
        Self {
            store,
            runtime,
            cluster_domain: cluster_domain.to_owned(),
            authority: None,
            schedule: LocalCertificateSchedule::default(),
            rounds: RefreshRounds::default(),
        }
    }

    /// Signs the wanted certificates, and the next ones before they expire, until `shutdown`. `is_leader` returns true
    /// if this replica may write. Before the first one is wanted, no authority is made.
    pub async fn run(mut self, is_leader: impl Fn() -> bool + Send, shutdown: CancellationToken) {
        let mut wanted = self.runtime.wanted_local_certificates();
        let mut next_refresh = Instant::now();
        loop {
            let next_round = Instant::now() + MIN_ROUND_INTERVAL;
            // Copied: no event may be stepped while the set is borrowed.
            let services = wanted.borrow_and_update().clone();
            if !services.is_empty() {
                if next_refresh <= Instant::now() {
                    self.try_refresh(is_leader()).await;
                    // Certificates are renewed at the same times.
                    next_refresh = Instant::now() + self.rounds.wait(self.authority.is_some());
                }
                let now = SystemTime::now();
                self.sign_due(&services, now).await;
                self.report_lasting_error(&services, now);
            }
            tokio::select! {
                changed = wanted.changed() => if changed.is_err() { return },
                () = sleep_until(next_refresh), if !services.is_empty() => {}
                () = shutdown.cancelled() => return,
            }
            if shutdown.run_until_cancelled(sleep_until(next_round)).await.is_none() {
                return;
            }
        }
    }

    /// Runs one round over the authorities. After an error the last one goes on to sign.
    async fn try_refresh(&mut self, is_leader: bool) {
        let error = match self.refresh(SystemTime::now(), is_leader).await {
            // A replica that follows waits for the leader.
            Ok(()) | Err(AuthorityError::NoAuthority) => None,
            Err(error) => Some(error_chain(&error)),
        };
        match self.rounds.record(error.clone()) {
            RefreshChange::Same => {}
            RefreshChange::Failed => {
                let error = error.unwrap_or_default();
                warn!(%error, "cluster-local authorities not refreshed, tried again in silence");
            }
            RefreshChange::Recovered => info!("cluster-local authorities refreshed again"),
        }
    }

    async fn refresh(&mut self, now: SystemTime, is_leader: bool) -> Result<(), AuthorityError> {
        let all = refresh_stored(&*self.store, &LOCAL_SCHEDULE, now, is_leader).await?;
        // Trust comes before the new signer. In each round, because the ConfigMap may have been deleted.
        if is_leader {
            publish_stored(&*self.store, &all).await?;
        }
        let signing = all.signing_authority(&LOCAL_SCHEDULE, unix_seconds(now));
        let signing = signing.ok_or(AuthorityError::NoAuthority)?;
        if self.authority.as_ref().is_none_or(|it| it.made_s != signing.made_s) {
            let signer = CertificateSigner::new(signing)?;
            self.authority = Some(LocalAuthority { signer, made_s: signing.made_s });
            info!(made_s = signing.made_s, "cluster-local authority signs");
        }
        Ok(())
    }

    /// Signs the certificates that are due, and passes each to the machine.
    async fn sign_due(&mut self, wanted: &BTreeMap<NamespacedName, u64>, now: SystemTime) {
        let Some(authority) = &self.authority else { return };
        let now_s = unix_seconds(now);
        for service in self.schedule.take_due(wanted, authority.made_s, now_s) {
            let hosts = local_hosts(&service, &self.cluster_domain);
            match authority.sign(&hosts, now) {
                Ok(material) => {
                    let request = wanted.get(&service).copied().unwrap_or_default();
                    self.schedule.record(service.clone(), request, authority.made_s, now_s);
                    let material = Arc::new(material);
                    self.runtime
                        .step(ControllerEvent::LocalCertificateSigned { service, material });
                }
                Err(error) => {
                    let error = error_chain(&error);
                    warn!(%service, %error, "certificate not signed");
                    self.report_failure(wanted.get_key_value(&service), &error, now_s);
                }
            }
            // Ten thousand signatures take a second, in which other tasks go on.
            tokio::task::yield_now().await;
        }
    }

    /// Reports an error of the authorities that lasts, with the services that it leaves without a valid certificate.
    fn report_lasting_error(&self, wanted: &BTreeMap<NamespacedName, u64>, now: SystemTime) {
        if let Some(error) = self.rounds.lasting_error() {
            self.report_failure(wanted, error, unix_seconds(now));
        }
    }

    /// Reports that no certificate can be signed for these services, except for those with a valid one of this signer.
    fn report_failure<'a>(
        &self,
        services: impl IntoIterator<Item = (&'a NamespacedName, &'a u64)>,
        error: &str,
        now_s: u64,
    ) {
        let lacks_valid = |(service, request): &(&NamespacedName, &u64)| {
            !self.schedule.has_valid(service, **request, now_s)
        };
        let services = services.into_iter().filter(lacks_valid).map(|(service, _)| service.clone());
        let services: BTreeSet<NamespacedName> = services.collect();
        if !services.is_empty() {
            let reason = shorten_error(error);
            self.runtime.step(ControllerEvent::LocalSigningFailed { services, reason });
        }
    }
}

impl LocalAuthority {
    /// Signs a certificate for hosts, with a new key.
    fn sign(&self, hosts: &[String], now: SystemTime) -> Result<CertificateMaterial, SignError> {
        let issued = self.signer.issue_for_hosts(hosts, now)?;
        Ok(CertificateMaterial {
            chain: vec![issued.certificate.to_vec()],
            key: PrivateKeyBytes::new(issued.key.secret_pkcs8_der().to_vec()),
        })
    }
}

#[cfg(test)]
mod tests;
