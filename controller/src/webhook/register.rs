//! Shell: keeps the certificate in its Secret and tells the API server where to ask.
//!
//! Every replica reads the Secret; who holds the lease makes and renews what is in it. The API server is told of a
//! certificate only after this replica has asked itself with it: a registration that nobody can answer would stop
//! every write to our objects.

use std::{
    net::{Ipv4Addr, SocketAddr},
    sync::Arc,
    time::{Duration, SystemTime},
};

use ::kube::{
    Api, Client, Resource,
    api::{Patch, PatchParams, PostParams},
};
use http_body_util::Full;
use hyper_util::rt::TokioIo;
use k8s_openapi::{
    ByteString,
    api::{
        admissionregistration::v1::{MutatingWebhookConfiguration, ValidatingWebhookConfiguration},
        core::v1::Secret,
    },
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
    InForce,
    certs::{Bundle, CertError, Certificates},
};
use crate::{knative::key, kube::lead::Leadership};

/// Who writes, where objects say so.
const MANAGER: &str = "rouse";
/// How often the Secret is read and the registration checked.
const EVERY: Duration = Duration::from_secs(15);
/// How long the first try after a failure waits.
const RETRY: Duration = Duration::from_secs(1);

/// Where the webhook is and what it is called.
#[derive(Clone, Debug)]
pub struct Place {
    /// Namespace of the installation.
    pub namespace: String,
    /// Service in it that leads to the replicas' webhook port, on 443.
    pub service: String,
    /// Secret in it that holds the certificate.
    pub secret: String,
    /// Port on which this replica answers.
    pub port: u16,
    /// Where the API server asks instead of at the Service, such as `https://127.0.0.1:8443`: for an API server beside
    /// the controller, outside a cluster.
    pub url: Option<String>,
}

impl Place {
    /// The installation in `namespace`, with Knative's names.
    pub fn new(namespace: &str, port: u16) -> Self {
        Self {
            namespace: namespace.into(),
            service: "webhook".into(),
            secret: "webhook-certs".into(),
            port,
            url: None,
        }
    }

    /// Names under which the API server may ask.
    pub fn names(&self) -> Vec<String> {
        let (service, namespace) = (&self.service, &self.namespace);
        let mut names = vec![
            service.clone(),
            format!("{service}.{namespace}"),
            format!("{service}.{namespace}.svc"),
            format!("{service}.{namespace}.svc.cluster.local"),
        ];
        let host = self.url.as_deref().and_then(|url| url.split_once("://"));
        names.extend(host.and_then(|(_, rest)| rest.split([':', '/']).next()).map(str::to_owned));
        names
    }

    /// How the API server finds `path`.
    fn client_config(&self, path: &str, bundle: &Value) -> Value {
        match &self.url {
            Some(url) => json!({"caBundle": bundle, "url": format!("{url}{path}")}),
            None => json!({
                "caBundle": bundle,
                "service": {
                    "name": self.service,
                    "namespace": self.namespace,
                    "path": path,
                    "port": 443,
                },
            }),
        }
    }
}

/// The API server could not be told.
#[derive(Debug, thiserror::Error)]
pub enum RegisterError {
    /// The Secret could not be read or written.
    #[error("cannot keep the webhook's Secret {name}")]
    Secret {
        /// Its name.
        name: String,
        /// Why.
        #[source]
        source: Box<::kube::Error>,
    },
    /// Certificates.
    #[error(transparent)]
    Certificate(#[from] CertError),
    /// This replica does not answer itself.
    #[error("the webhook on port {port} does not answer: {why}")]
    SelfCall {
        /// Its port.
        port: u16,
        /// Why.
        why: String,
    },
    /// The registration could not be written.
    #[error("cannot register the webhook {name}")]
    Register {
        /// Name of the configuration.
        name: &'static str,
        /// Why.
        #[source]
        source: Box<::kube::Error>,
    },
}

/// Keeps certificate and registration until `shutdown`.
pub async fn keep(
    client: Client,
    place: Place,
    certificates: Arc<Certificates>,
    settings: InForce,
    mut leadership: Leadership,
    shutdown: CancellationToken,
) {
    let mut registered = None;
    loop {
        let leads = leadership.may_write();
        let binds = settings().bind_pods;
        let once = once(&client, &place, &certificates, leads, binds, &mut registered);
        let wait = match once.await {
            Ok(true) => EVERY,
            // Who leads is about to make it, and this replica may be asked as soon as it is there.
            Ok(false) => RETRY,
            Err(error) => {
                let error = &error as &dyn std::error::Error;
                warn!(error, "webhook not registered");
                RETRY
            }
        };
        tokio::select! {
            () = tokio::time::sleep(wait) => {}
            () = switched(&mut leadership, leads) => {}
            () = shutdown.cancelled() => return,
        }
    }
}

/// Waits until the lease was won or lost; its renewals say nothing new.
async fn switched(leadership: &mut Leadership, leads: bool) {
    while leadership.may_write() == leads {
        leadership.changed().await;
    }
}

/// Says whether there is a certificate.
async fn once(
    client: &Client,
    place: &Place,
    certificates: &Arc<Certificates>,
    leads: bool,
    binds: bool,
    registered: &mut Option<Bundle>,
) -> Result<bool, RegisterError> {
    let bundle = bundle(client, place, leads, SystemTime::now()).await?;
    let Some(bundle) = bundle else { return Ok(false) };
    if certificates.set(&bundle)? {
        info!(secret = place.secret, "webhook certificate loaded");
    }
    if !leads {
        *registered = None;
        return Ok(true);
    }
    self_call(place, &bundle).await?;
    register(client, place, &bundle, binds).await?;
    if registered.as_ref() != Some(&bundle) {
        info!(service = place.service, "webhook registered");
        *registered = Some(bundle);
    }
    Ok(true)
}

/// What the Secret holds; made anew by who leads where it is missing, broken or due.
async fn bundle(
    client: &Client,
    place: &Place,
    leads: bool,
    now: SystemTime,
) -> Result<Option<Bundle>, RegisterError> {
    let failed = |source: ::kube::Error| RegisterError::Secret {
        name: place.secret.clone(),
        source: Box::new(source),
    };
    let api: Api<Secret> = Api::namespaced(client.clone(), &place.namespace);
    let have = api.get_opt(&place.secret).await.map_err(failed)?;
    let held = have.as_ref().and_then(|it| Bundle::read(it.data.as_ref()?));
    if !leads || held.as_ref().is_some_and(|bundle| !bundle.is_due(now)) {
        return Ok(held);
    }
    let made = Bundle::make(&place.names(), held.as_ref(), now)?;
    let params = PostParams { field_manager: Some(MANAGER.into()), ..PostParams::default() };
    // With the version that was read: whoever else just led has not lost what it wrote.
    let written = match have {
        Some(mut secret) => {
            secret.data = Some(made.data());
            api.replace(&place.secret, &params, &secret).await
        }
        None => {
            let mut secret = Secret { data: Some(made.data()), ..Secret::default() };
            secret.metadata.name = Some(place.secret.clone());
            api.create(&params, &secret).await
        }
    };
    written.map_err(failed)?;
    info!(secret = place.secret, "webhook certificate made");
    Ok(Some(made))
}

/// Asks this replica as the API server would.
pub(super) async fn self_call(place: &Place, bundle: &Bundle) -> Result<(), RegisterError> {
    let asked = tokio::time::timeout(Duration::from_secs(5), ask(place, bundle)).await;
    let why = match asked {
        Ok(Ok(())) => return Ok(()),
        Ok(Err(why)) => why.to_string(),
        Err(_) => "no answer within 5 s".to_owned(),
    };
    Err(RegisterError::SelfCall { port: place.port, why })
}

type AnyError = Box<dyn std::error::Error + Send + Sync>;

async fn ask(place: &Place, bundle: &Bundle) -> Result<(), AnyError> {
    let mut roots = RootCertStore::empty();
    for authority in CertificateDer::pem_slice_iter(bundle.authority.as_bytes()) {
        roots.add(authority?)?;
    }
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let config = ClientConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()?
        .with_root_certificates(roots)
        .with_no_client_auth();
    let name = format!("{}.{}.svc", place.service, place.namespace);
    let stream = TcpStream::connect(SocketAddr::from((Ipv4Addr::LOCALHOST, place.port))).await?;
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
    let response = sender.send_request(request).await;
    driver.abort();
    let status = response?.status();
    if status.is_success() { Ok(()) } else { Err(format!("answered {status}").into()) }
}

async fn register(
    client: &Client,
    place: &Place,
    bundle: &Bundle,
    binds: bool,
) -> Result<(), RegisterError> {
    let (mutating, validating) = configurations(place, &bundle.authority, binds);
    apply::<MutatingWebhookConfiguration>(client, DEFAULTING, &mutating).await?;
    apply::<ValidatingWebhookConfiguration>(client, VALIDATION, &validating[0]).await?;
    apply::<ValidatingWebhookConfiguration>(client, CONFIG, &validating[1]).await
}

async fn apply<K>(client: &Client, name: &'static str, body: &Value) -> Result<(), RegisterError>
where
    K: Resource<DynamicType = (), Scope = k8s_openapi::ClusterResourceScope>
        + Clone
        + DeserializeOwned
        + Serialize
        + std::fmt::Debug,
{
    let api: Api<K> = Api::all(client.clone());
    let params = PatchParams::apply(MANAGER).force();
    let applied = api.patch(name, &params, &Patch::Apply(body)).await;
    applied.map_err(|source| RegisterError::Register { name, source: Box::new(source) })?;
    Ok(())
}

/// Names as in Knative: error messages show them.
const DEFAULTING: &str = "webhook.serving.knative.dev";
const VALIDATION: &str = "validation.webhook.serving.knative.dev";
const CONFIG: &str = "config.webhook.serving.knative.dev";
/// Rouse's own, beside that which fills objects in.
const BINDING: &str = "binding.webhook.rouse.dev";

/// What the API server is told: which objects it must ask about, and whom.
pub(super) fn configurations(place: &Place, authority: &str, binds: bool) -> (Value, [Value; 2]) {
    let bundle =
        serde_json::to_value(ByteString(authority.as_bytes().to_vec())).unwrap_or_default();
    let hook = |name: &str, path: &str, rules: Value| {
        json!({
            "name": name,
            "admissionReviewVersions": ["v1"],
            "clientConfig": place.client_config(path, &bundle),
            "failurePolicy": "Fail",
            "matchPolicy": "Equivalent",
            "rules": rules,
            "sideEffects": "None",
            "timeoutSeconds": 10,
        })
    };
    let whole = |kind: &str, name: &str, hook: Value| {
        json!({
            "apiVersion": "admissionregistration.k8s.io/v1",
            "kind": kind,
            "metadata": {"name": name, "labels": {"app.kubernetes.io/part-of": "rouse"}},
            "webhooks": [hook],
        })
    };
    let mut defaulting = hook(DEFAULTING, "/defaulting", objects(false));
    // What another webhook adds, such as a volume, is filled in too.
    defaulting["reinvocationPolicy"] = "IfNeeded".into();
    let validation = hook(VALIDATION, "/resource-validation", objects(true));
    let mut config = hook(CONFIG, "/config-validation", config_maps());
    config["namespaceSelector"] =
        json!({"matchLabels": {"kubernetes.io/metadata.name": place.namespace}});
    // Those of an installation that was Knative's are judged as well.
    let names = ["knative-serving", "rouse"];
    config["objectSelector"] = json!({
        "matchExpressions": [{"key": "app.kubernetes.io/name", "operator": "In", "values": names}],
    });
    let mut mutating = whole("MutatingWebhookConfiguration", DEFAULTING, defaulting);
    if binds && let Some(hooks) = mutating["webhooks"].as_array_mut() {
        hooks.push(binding(hook(BINDING, "/binding", pods())));
    }
    let validating = "ValidatingWebhookConfiguration";
    (mutating, [whole(validating, VALIDATION, validation), whole(validating, CONFIG, config)])
}

/// Nobody waits for this one when it does not answer: the scheduler finds a node as well.
fn binding(mut hook: Value) -> Value {
    hook["failurePolicy"] = "Ignore".into();
    hook["timeoutSeconds"] = 1.into();
    hook["objectSelector"] =
        json!({"matchExpressions": [{"key": key::REVISION_UID, "operator": "Exists"}]});
    hook
}

fn pods() -> Value {
    json!([{
        "apiGroups": [""],
        "apiVersions": ["v1"],
        "resources": ["pods"],
        "operations": ["CREATE"],
        "scope": "Namespaced",
    }])
}

/// Our own kinds and no subresource: statuses are ours to write, and nobody waits for a webhook then.
fn objects(with_claims: bool) -> Value {
    let rule = |group: &str, versions: &[&str], resources: &[&str], scope: &str| {
        json!({
            "apiGroups": [group],
            "apiVersions": versions,
            "resources": resources,
            "operations": ["CREATE", "UPDATE"],
            "scope": scope,
        })
    };
    let serving = ["services", "configurations", "revisions", "routes"];
    let autoscaling = ["podautoscalers", "metrics"];
    let networking = "networking.internal.knative.dev";
    let mut rules = vec![
        rule("serving.knative.dev", &["v1"], &serving, "Namespaced"),
        rule("serving.knative.dev", &["v1beta1"], &["domainmappings"], "Namespaced"),
        rule("autoscaling.internal.knative.dev", &["v1alpha1"], &autoscaling, "Namespaced"),
        rule(networking, &["v1alpha1"], &["serverlessservices"], "Namespaced"),
    ];
    if with_claims {
        rules.push(rule(networking, &["v1alpha1"], &["clusterdomainclaims"], "Cluster"));
    }
    rules.into()
}

fn config_maps() -> Value {
    json!([{
        "apiGroups": [""],
        "apiVersions": ["v1"],
        "resources": ["configmaps"],
        "operations": ["CREATE", "UPDATE"],
        "scope": "Namespaced",
    }])
}
