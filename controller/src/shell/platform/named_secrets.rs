//! Shell: Secrets that mappings and settings name, read from the API server one by one.
//!
//! They are neither listed nor watched: the right to watch cannot be limited to names that users choose later, and a
//! watch of each name would need a connection of its own.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
    time::Duration,
};

use common::{
    certificates::{self, CertificateFault, parse_client_ca},
    once_signal::OnceSignal,
    wire::{NamespacedName, is_dns_label, is_secret_name},
};
use futures::{StreamExt as _, stream::FuturesUnordered};
use k8s_openapi::{ByteString, api::core::v1::Secret};
use kube::{Client, Resource as _, api::GetParams, core::Request};
use tokio::{
    sync::watch,
    time::{Instant, sleep, timeout},
};

use super::KubernetesPlatform;
use crate::{
    decide::machine::ControllerEvent,
    model::cluster_state::{ClientCaRead, SecretRead, SecretReadState, shorten_error},
    shell::{
        api::{secret_schedule::SecretSchedule, watches::error_chain},
        metrics::SecretReadResult,
        runtime::ControllerRuntime,
    },
};

/// Maximum number of reads in progress.
const MAX_PARALLEL_READS: usize = 8;
/// Time limit of one read.
const READ_TIMEOUT: Duration = Duration::from_secs(5);
/// Entry of a Secret that has the certificate chain, whatever the Secret's type.
const CHAIN_ENTRY: &str = "tls.crt";
/// Entry of a Secret that has the private key.
const KEY_ENTRY: &str = "tls.key";
/// Entry of a Secret that has authorities of client certificates.
const CLIENT_CA_ENTRY: &str = "ca.crt";
/// Reason for which a controller without TLS reads no Secret.
const NO_TLS: &str = "the streams to activators have no TLS, so no keys are sent";

/// Response to one read: the Secret, or what is known without one.
type SecretResponse = Result<Secret, SecretReadError>;

/// Result of a read that has brought no Secret.
#[derive(Clone, Debug, PartialEq, Eq)]
enum SecretReadError {
    /// The Secret does not exist.
    Absent,
    /// No Secret can have this name.
    Faulty(String),
    /// The API server has returned this error.
    Unreadable(String),
}

impl From<SecretReadError> for SecretRead {
    fn from(error: SecretReadError) -> Self {
        match error {
            SecretReadError::Absent => Self::Absent,
            SecretReadError::Faulty(fault) => Self::Faulty(fault),
            SecretReadError::Unreadable(text) => Self::Unreadable(text),
        }
    }
}

impl From<SecretReadError> for ClientCaRead {
    fn from(error: SecretReadError) -> Self {
        match error {
            SecretReadError::Absent => Self::Absent,
            SecretReadError::Faulty(fault) => Self::Faulty(fault),
            SecretReadError::Unreadable(text) => Self::Unreadable(text),
        }
    }
}

/// Use of Secrets that one reader reads. A Secret that is named for both is read for each, and only what the use needs
/// leaves the reader.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum SecretUse {
    /// Certificate of hosts, with its private key.
    Certificate,
    /// Authorities of client certificates.
    ClientCa,
}

impl KubernetesPlatform {
    /// Reads the named Secrets, or refuses them if routes are served without TLS. Sets `first_read` once new streams
    /// need not wait for certificates. Begins after the step of [`ControllerEvent::InitialListSynced`], and never ends.
    pub(super) async fn follow_named_secrets(&self, first_read: OnceSignal) {
        if self.reads_secrets {
            let (certificates_read, client_cas_read) = (OnceSignal::new(), OnceSignal::new());
            let reader = || (self.client.clone(), Arc::clone(&self.runtime));
            let (client, runtime) = reader();
            let certificates = read_named_secrets(client, runtime, certificates_read.clone());
            let (client, runtime) = reader();
            let client_cas = read_named_client_cas(client, runtime, client_cas_read.clone());
            let both_read = async {
                certificates_read.wait().await;
                client_cas_read.wait().await;
                first_read.set();
            };
            tokio::join!(certificates, client_cas, both_read);
        } else {
            first_read.set();
            refuse_named_secrets(&self.runtime).await;
        }
        // They end only with the runtime, which `self` holds; the caller must not end this replica then.
        std::future::pending().await
    }
}

/// Reads each named Secret at the times of a [`SecretSchedule`], and passes the results to the machine. Sets
/// `first_read` once each name was read, whatever the result. It ends only with `runtime`, which it holds itself.
///
/// It must begin after the step of [`ControllerEvent::InitialListSynced`]. Before that step no name is known, so
/// `first_read` would be set at once.
///
/// If the future is dropped, the reads in progress are dropped too, without a result.
pub async fn read_named_secrets(
    client: Client,
    runtime: Arc<ControllerRuntime>,
    first_read: OnceSignal,
) {
    let names = runtime.named_secrets();
    let reader = SecretReader::new(runtime, SecretUse::Certificate);
    follow_names(client, names, reader, first_read).await;
}

/// Reads each Secret that a mapping names for authorities of client certificates, as [`read_named_secrets`] does for
/// certificates.
pub async fn read_named_client_cas(
    client: Client,
    runtime: Arc<ControllerRuntime>,
    first_read: OnceSignal,
) {
    let names = runtime.named_client_cas();
    let reader = SecretReader::new(runtime, SecretUse::ClientCa);
    follow_names(client, names, reader, first_read).await;
}

/// Reads all Secrets of a set that changes. It ends with the sender of the set.
async fn follow_names(
    client: Client,
    mut names: watch::Receiver<BTreeSet<NamespacedName>>,
    mut reader: SecretReader,
    first_read: OnceSignal,
) {
    let mut reads = FuturesUnordered::new();
    // Before the first wait: `changed` reports no value that was there at the start.
    reader.set_names(&names.borrow_and_update());
    loop {
        if reader.schedule.has_read_all() {
            first_read.set();
        }
        let now = reader.started_at.elapsed();
        let free = MAX_PARALLEL_READS.saturating_sub(reads.len());
        for name in reader.schedule.take_due(now, free) {
            reads.push(read_secret(client.clone(), name));
        }
        // While no more reads may begin, the next one begins when another ends, and not at a time.
        let due = reader.schedule.next_due().filter(|_| reads.len() < MAX_PARALLEL_READS);
        let wait = due.map(|at| at.saturating_sub(now));
        tokio::select! {
            changed = names.changed() => {
                if changed.is_err() {
                    return;
                }
                reader.set_names(&names.borrow_and_update());
            }
            Some((name, response)) = reads.next() => reader.handle_response(name, response),
            () = sleep(wait.unwrap_or_default()), if wait.is_some() => {}
        }
    }
}

/// Reports each named Secret as unreadable, since private keys are sent by TLS only. It ends with `runtime`.
pub async fn refuse_named_secrets(runtime: &ControllerRuntime) {
    let (mut certificates, mut client_cas) = (runtime.named_secrets(), runtime.named_client_cas());
    loop {
        // Copied: no event may be stepped while a set is borrowed.
        let named = certificates.borrow_and_update().clone();
        for name in named {
            let read = SecretRead::Unreadable(NO_TLS.to_owned());
            runtime.step(ControllerEvent::SecretRead { name, read });
        }
        let named = client_cas.borrow_and_update().clone();
        for name in named {
            let read = ClientCaRead::Unreadable(NO_TLS.to_owned());
            runtime.step(ControllerEvent::ClientCaRead { name, read });
        }
        let changed = tokio::select! {
            changed = certificates.changed() => changed,
            changed = client_cas.changed() => changed,
        };
        if changed.is_err() {
            return;
        }
    }
}

/// Reader of the named Secrets: their schedule, and what it knows of them.
struct SecretReader {
    runtime: Arc<ControllerRuntime>,
    secret_use: SecretUse,
    schedule: SecretSchedule,
    /// `resourceVersion` of the last usable read, by name.
    versions: BTreeMap<NamespacedName, String>,
    started_at: Instant,
}

impl SecretReader {
    fn new(runtime: Arc<ControllerRuntime>, secret_use: SecretUse) -> Self {
        let (schedule, versions) = (SecretSchedule::default(), BTreeMap::new());
        Self { runtime, secret_use, schedule, versions, started_at: Instant::now() }
    }

    /// Replaces the names, and forgets the versions of Secrets that are no longer named.
    fn set_names(&mut self, names: &BTreeSet<NamespacedName>) {
        self.schedule.set_names(names, self.started_at.elapsed());
        self.versions.retain(|name, _| names.contains(name));
    }

    /// Passes the result of a read to the machine, unless the machine has what it brings already.
    fn handle_response(&mut self, name: NamespacedName, response: SecretResponse) {
        if !self.schedule.is_named(&name) {
            // Nothing uses it any more.
            self.schedule.record(&name, false, self.started_at.elapsed());
            return;
        }
        let version = response.as_ref().ok().and_then(|it| it.metadata.resource_version.clone());
        if self.is_unchanged(&name, version.as_deref()) {
            return self.record(&name, SecretReadResult::Unchanged);
        }
        let (result, event) = self.read_event(name.clone(), response);
        match version.filter(|_| result == SecretReadResult::Usable) {
            Some(version) => drop(self.versions.insert(name.clone(), version)),
            None => drop(self.versions.remove(&name)),
        }
        self.record(&name, result);
        self.runtime.step(event);
    }

    /// Takes from a Secret what its use needs. Returns the event for the machine, and the result to count.
    fn read_event(
        &self,
        name: NamespacedName,
        response: SecretResponse,
    ) -> (SecretReadResult, ControllerEvent) {
        match self.secret_use {
            SecretUse::Certificate => {
                let read = response.map_or_else(SecretRead::from, read_certificate);
                (result_of(&read), ControllerEvent::SecretRead { name, read })
            }
            SecretUse::ClientCa => {
                let read = response.map_or_else(ClientCaRead::from, read_client_ca);
                (result_of_client_ca(&read), ControllerEvent::ClientCaRead { name, read })
            }
        }
    }

    /// Returns true if a Secret of this version need not be parsed: what it holds is in force.
    ///
    /// The machine may have refused the same certificate, which is not valid yet, and then gets it again. It may also
    /// have forgotten it: a name that leaves and comes back soon may be no change for this reader.
    fn is_unchanged(&self, name: &NamespacedName, version: Option<&str>) -> bool {
        let last = self.versions.get(name).map(String::as_str);
        last.is_some()
            && last == version
            && self.runtime.with_machine(|machine| {
                let cluster = machine.cluster();
                let last_read = match self.secret_use {
                    SecretUse::Certificate => {
                        cluster.certificates.by_secret.get(name).map(|it| &it.last_read)
                    }
                    SecretUse::ClientCa => {
                        cluster.client_cas.by_secret.get(name).map(|it| &it.last_read)
                    }
                };
                matches!(last_read, Some(SecretReadState::InForce))
            })
    }

    /// Counts a read, and schedules the next one.
    fn record(&mut self, name: &NamespacedName, result: SecretReadResult) {
        let is_usable = match result {
            SecretReadResult::Usable | SecretReadResult::Unchanged => true,
            SecretReadResult::Absent | SecretReadResult::Faulty | SecretReadResult::Unreadable => {
                false
            }
        };
        self.schedule.record(name, is_usable, self.started_at.elapsed());
        self.runtime.metrics.count_secret_read(result);
    }
}

fn result_of(read: &SecretRead) -> SecretReadResult {
    match read {
        SecretRead::Usable { .. } => SecretReadResult::Usable,
        SecretRead::Absent => SecretReadResult::Absent,
        SecretRead::Faulty(_) => SecretReadResult::Faulty,
        SecretRead::Unreadable(_) => SecretReadResult::Unreadable,
    }
}

fn result_of_client_ca(read: &ClientCaRead) -> SecretReadResult {
    match read {
        ClientCaRead::Usable(_) => SecretReadResult::Usable,
        ClientCaRead::Absent => SecretReadResult::Absent,
        ClientCaRead::Faulty(_) => SecretReadResult::Faulty,
        ClientCaRead::Unreadable(_) => SecretReadResult::Unreadable,
    }
}

/// Returns the authorities of client certificates in a Secret, or their fault. Nothing else of the Secret is kept, also
/// if it has a private key.
fn read_client_ca(secret: Secret) -> ClientCaRead {
    let mut data = secret.data.unwrap_or_default();
    let Some(ByteString(authorities)) = data.remove(CLIENT_CA_ENTRY) else {
        return ClientCaRead::Faulty(format!("it has no {CLIENT_CA_ENTRY}"));
    };
    match parse_client_ca(&authorities) {
        Ok(material) => ClientCaRead::Usable(Arc::new(material)),
        Err(fault) => ClientCaRead::Faulty(fault.to_string()),
    }
}

/// Returns the certificate in a Secret, or its fault. Nothing else of the Secret is kept.
fn read_certificate(secret: Secret) -> SecretRead {
    let mut data = secret.data.unwrap_or_default();
    let Some(ByteString(chain)) = data.remove(CHAIN_ENTRY) else {
        return SecretRead::Faulty(format!("it has no {CHAIN_ENTRY}"));
    };
    let Some(ByteString(key)) = data.remove(KEY_ENTRY) else {
        return SecretRead::Faulty(format!("it has no {KEY_ENTRY}"));
    };
    parse_certificate(&chain, &key).unwrap_or_else(|fault| SecretRead::Faulty(fault.to_string()))
}

fn parse_certificate(chain: &[u8], key: &[u8]) -> Result<SecretRead, CertificateFault> {
    let material = certificates::parse_pem(chain, key)?;
    // The key for handshakes is made to check it, and dropped: this component makes none.
    let facts = certificates::load(&material)?.facts;
    Ok(SecretRead::Usable { material: Arc::new(material), facts })
}

/// Reads one Secret within [`READ_TIMEOUT`].
async fn read_secret(client: Client, name: NamespacedName) -> (NamespacedName, SecretResponse) {
    let response = match timeout(READ_TIMEOUT, request_secret(&client, &name)).await {
        Ok(response) => response,
        Err(_elapsed) => {
            let seconds = READ_TIMEOUT.as_secs();
            let text = format!("the API server has not answered within {seconds} s");
            Err(SecretReadError::Unreadable(text))
        }
    };
    (name, response)
}

async fn request_secret(client: &Client, name: &NamespacedName) -> SecretResponse {
    // kube puts names into the path as they are, and one with slashes would lead to another namespace.
    if !is_dns_label(&name.namespace) || !is_secret_name(&name.name) {
        return Err(SecretReadError::Faulty("its name is not made of DNS labels".to_owned()));
    }
    let path = Secret::url_path(&(), Some(name.namespace.as_str()));
    let request = Request::new(path).get(&name.name, &GetParams::default());
    let request = request.map_err(|error| SecretReadError::Unreadable(error_chain(&error)))?;
    match client.request_text(request).await {
        Ok(text) => parse_secret(&text),
        Err(kube::Error::Api(status)) if status.is_not_found() => Err(SecretReadError::Absent),
        Err(error) => Err(SecretReadError::Unreadable(error_text(&error))),
    }
}

/// Parses the response of the API server. kube would log a response that it cannot parse, with the key in it.
fn parse_secret(text: &str) -> SecretResponse {
    // The error may quote a part of the response, so it is not shown.
    serde_json::from_str(text).ok().ok_or_else(|| {
        SecretReadError::Unreadable("the response of the API server is not a Secret".to_owned())
    })
}

/// Returns an error in one line, for a condition: the API server's own message if there is one.
fn error_text(error: &kube::Error) -> String {
    let text = match error {
        kube::Error::Api(status) if !status.message.is_empty() => status.message.clone(),
        error => error_chain(error),
    };
    shorten_error(&text)
}

#[cfg(test)]
mod tests;
