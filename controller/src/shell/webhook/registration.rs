//! Shell: keeps the certificate in its Secret, and registers the webhook with the API server.
//!
//! Every replica reads the Secret; the leader makes and renews its content. A certificate is registered only after this
//! replica has called itself with it. A registration that no replica can serve would stop every write to Rouse's
//! objects.

use std::{
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr},
    sync::Arc,
    time::{Duration, SystemTime},
};

use http_body_util::Full;
use hyper_util::rt::TokioIo;
use k8s_openapi::api::{
    admissionregistration::v1::{MutatingWebhookConfiguration, ValidatingWebhookConfiguration},
    core::v1::Secret,
};
use kube::{
    Api, Client, Resource,
    api::{Patch, PatchParams, PostParams},
};
use rustls::{
    ClientConfig, RootCertStore,
    pki_types::{CertificateDer, ServerName, pem::PemObject},
};
use serde::{Serialize, de::DeserializeOwned};
use serde_json::{Value, json};
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;
use tokio_util::sync::CancellationToken;
use tracing::{info, warn};

use super::{
    WebhookSettingsSource,
    certificates::{WebhookCertBundle, WebhookCertError, WebhookCertResolver},
    configurations::{
        CONFIG_WEBHOOK, DEFAULTING_WEBHOOK, VALIDATION_WEBHOOK, WebhookAddress,
        webhook_configurations,
    },
};
use crate::shell::api::leader_election::Leadership;

/// Field manager of the written objects.
const WEBHOOK_FIELD_MANAGER: &str = "rouse";
/// Interval between checks of Secret and registration.
const CHECK_INTERVAL: Duration = Duration::from_secs(15);
/// Wait before the next attempt after a failure, or while there is no certificate.
const RETRY_INTERVAL: Duration = Duration::from_secs(1);

/// Error that keeps the webhook from being registered.
#[derive(Debug, thiserror::Error)]
pub enum WebhookRegistrationError {
    /// The Secret could not be read or written.
    #[error("cannot keep the webhook's Secret {name}")]
    Secret {
        /// Name of the Secret, without its namespace.
        name: String,
        /// Error of the API server.
        #[source]
        source: Box<kube::Error>,
    },
    /// The certificate could not be made or used.
    #[error(transparent)]
    Certificate(#[from] WebhookCertError),
    /// This replica does not respond to its own call.
    #[error("the webhook on port {port} does not respond: {why}")]
    SelfCall {
        /// Port at which this replica should serve the webhook.
        port: u16,
        /// Reason, as text for operators.
        why: String,
    },
    /// The registration could not be written.
    #[error("cannot register the webhook {name}")]
    Register {
        /// Name of the webhook configuration.
        name: &'static str,
        /// Error of the API server.
        #[source]
        source: Box<kube::Error>,
    },
}

/// Keeps certificate and registration up to date until `shutdown`.
pub async fn keep_registered(
    client: Client,
    address: WebhookAddress,
    certificates: Arc<WebhookCertResolver>,
    settings: WebhookSettingsSource,
    mut leadership: Leadership,
    shutdown: CancellationToken,
) {
    let mut registered = None;
    loop {
        let is_leader = leadership.may_write();
        let places_pods = settings().places_pods();
        let check =
            check_once(&client, &address, &certificates, is_leader, places_pods, &mut registered);
        let wait = match check.await {
            Ok(true) => CHECK_INTERVAL,
            // The leader is about to make the certificate, and the API server may call this replica as soon as it
            // exists.
            Ok(false) => RETRY_INTERVAL,
            Err(error) => {
                let error = &error as &dyn std::error::Error;
                warn!(error, "webhook not registered");
                RETRY_INTERVAL
            }
        };
        tokio::select! {
            () = tokio::time::sleep(wait) => {}
            () = wait_for_leadership_change(&mut leadership, is_leader) => {}
            () = shutdown.cancelled() => return,
        }
    }
}

/// Waits until the lease was won or lost; renewals do not count.
async fn wait_for_leadership_change(leadership: &mut Leadership, is_leader: bool) {
    while leadership.may_write() == is_leader {
        leadership.changed().await;
    }
}

/// Checks once. Returns true if there is a certificate.
async fn check_once(
    client: &Client,
    address: &WebhookAddress,
    certificates: &Arc<WebhookCertResolver>,
    is_leader: bool,
    places_pods: bool,
    registered: &mut Option<WebhookCertBundle>,
) -> Result<bool, WebhookRegistrationError> {
    let bundle = load_or_renew_bundle(client, address, is_leader, SystemTime::now()).await?;
    let Some(bundle) = bundle else { return Ok(false) };
    if certificates.set(&bundle)? {
        info!(secret = address.secret, "webhook certificate loaded");
    }
    // Another leader may register another certificate meanwhile: this replica's next registration is news again.
    if !is_leader {
        *registered = None;
        return Ok(true);
    }
    // This order matters: a registered webhook that does not respond blocks all writes (`failurePolicy: Fail`).
    check_self_call(address, &bundle).await?;
    apply_registrations(client, address, &bundle, places_pods).await?;
    if registered.as_ref() != Some(&bundle) {
        info!(service = address.service, "webhook registered");
        *registered = Some(bundle);
    }
    Ok(true)
}

/// Returns the content of the Secret. The leader renews it if it is missing, invalid or due.
async fn load_or_renew_bundle(
    client: &Client,
    address: &WebhookAddress,
    is_leader: bool,
    now: SystemTime,
) -> Result<Option<WebhookCertBundle>, WebhookRegistrationError> {
    let failed = |source: kube::Error| WebhookRegistrationError::Secret {
        name: address.secret.clone(),
        source: Box::new(source),
    };
    let api: Api<Secret> = Api::namespaced(client.clone(), &address.namespace);
    let secret = api.get_opt(&address.secret).await.map_err(failed)?;
    let old_bundle =
        secret.as_ref().and_then(|it| WebhookCertBundle::from_secret_data(it.data.as_ref()?));
    if !is_leader || old_bundle.as_ref().is_some_and(|bundle| !bundle.is_due(now)) {
        return Ok(old_bundle);
    }
    let new_bundle = WebhookCertBundle::create(&address.host_names(), old_bundle.as_ref(), now)?;
    let params =
        PostParams { field_manager: Some(WEBHOOK_FIELD_MANAGER.into()), ..PostParams::default() };
    // The write carries the version that was read: it fails if another leader has written meanwhile.
    let written = match secret {
        Some(mut secret) => {
            secret.data = Some(new_bundle.to_secret_data());
            api.replace(&address.secret, &params, &secret).await
        }
        None => {
            let mut secret =
                Secret { data: Some(new_bundle.to_secret_data()), ..Secret::default() };
            secret.metadata.name = Some(address.secret.clone());
            api.create(&params, &secret).await
        }
    };
    written.map_err(failed)?;
    info!(secret = address.secret, "webhook certificate made");
    Ok(Some(new_bundle))
}

/// Calls this replica as the API server would.
pub(super) async fn check_self_call(
    address: &WebhookAddress,
    bundle: &WebhookCertBundle,
) -> Result<(), WebhookRegistrationError> {
    let response = tokio::time::timeout(Duration::from_secs(5), call_self(address, bundle)).await;
    let error = match response {
        Ok(Ok(())) => return Ok(()),
        Ok(Err(error)) => error.to_string(),
        Err(_) => "no response within 5 s".to_owned(),
    };
    Err(WebhookRegistrationError::SelfCall { port: address.port, why: error })
}

type SelfCallError = Box<dyn std::error::Error + Send + Sync>;

/// Calls this replica's own webhook as the API server would, but for the address.
async fn call_self(
    address: &WebhookAddress,
    bundle: &WebhookCertBundle,
) -> Result<(), SelfCallError> {
    let mut roots = RootCertStore::empty();
    for authority in CertificateDer::pem_slice_iter(bundle.authority.as_bytes()) {
        roots.add(authority?)?;
    }
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let config = ClientConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()?
        .with_root_certificates(roots)
        .with_no_client_auth();
    let name = format!("{}.{}.svc", address.service, address.namespace);
    // The listener may be open for one IP family only.
    let loopback = [IpAddr::from(Ipv4Addr::LOCALHOST), IpAddr::from(Ipv6Addr::LOCALHOST)];
    let own_addresses = loopback.map(|ip| SocketAddr::new(ip, address.port));
    let stream = TcpStream::connect(&own_addresses[..]).await?;
    let connector = TlsConnector::from(Arc::new(config));
    let stream = connector.connect(ServerName::try_from(name.clone())?, stream).await?;
    let (mut sender, connection) =
        hyper::client::conn::http1::handshake(TokioIo::new(stream)).await?;
    let driver = tokio::spawn(connection);
    let review = json!({
        "apiVersion": "admission.k8s.io/v1",
        "kind": "AdmissionReview",
        "request": {"uid": "self-call", "operation": "CONNECT"},
    });
    let request = hyper::Request::post("/resource-validation")
        .header("host", name)
        .header("content-type", "application/json")
        .body(Full::new(bytes::Bytes::from(review.to_string())))?;
    // The connection serves this one request: its task need not outlive the response.
    let response = sender.send_request(request).await;
    driver.abort();
    let status = response?.status();
    if status.is_success() { Ok(()) } else { Err(format!("responded {status}").into()) }
}

async fn apply_registrations(
    client: &Client,
    address: &WebhookAddress,
    bundle: &WebhookCertBundle,
    places_pods: bool,
) -> Result<(), WebhookRegistrationError> {
    let (mutating, validating) = webhook_configurations(address, &bundle.authority, places_pods);
    apply_configuration::<MutatingWebhookConfiguration>(client, DEFAULTING_WEBHOOK, &mutating)
        .await?;
    apply_configuration::<ValidatingWebhookConfiguration>(
        client,
        VALIDATION_WEBHOOK,
        &validating[0],
    )
    .await?;
    apply_configuration::<ValidatingWebhookConfiguration>(client, CONFIG_WEBHOOK, &validating[1])
        .await
}

async fn apply_configuration<K>(
    client: &Client,
    name: &'static str,
    body: &Value,
) -> Result<(), WebhookRegistrationError>
where
    K: Resource<DynamicType = (), Scope = k8s_openapi::ClusterResourceScope>
        + Clone
        + DeserializeOwned
        + Serialize
        + std::fmt::Debug,
{
    let api: Api<K> = Api::all(client.clone());
    // These objects are Rouse's own: fields that others have changed are taken back.
    let params = PatchParams::apply(WEBHOOK_FIELD_MANAGER).force();
    let applied = api.patch(name, &params, &Patch::Apply(body)).await;
    applied
        .map_err(|source| WebhookRegistrationError::Register { name, source: Box::new(source) })?;
    Ok(())
}
