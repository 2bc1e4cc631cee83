use std::{
    collections::BTreeMap,
    net::SocketAddr,
    sync::{
        Mutex,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
};

use common::{
    component::Component,
    enrollment,
    link::{ComponentLink, PodReportKey, ReplicaResolver},
    local_node::LocalNodeSpec,
    outbox::Outbox,
    tls::{TlsCredentials, peer::CertificateIdentity},
    wire::{
        ClientComponent, ComponentReplica, PodReportItem, ScaleItem, ServerComponent,
        raw::{
            self, identity_client::IdentityClient, pods_client::PodsClient,
            routes_client::RoutesClient, scale_client::ScaleClient,
        },
    },
};
use rcgen::{CertificateParams, KeyPair};
use tokio::{net::TcpListener, sync::watch};
use tokio_util::sync::CancellationToken;
use tonic::{Code, transport::Channel};

use super::{
    rotation::{COMPONENT_SCHEDULE, CertificateAuthorities},
    *,
};
use crate::{
    decide::machine::ControllerStateMachine,
    model::cluster_state::ClusterState,
    shell::{grpc_services, runtime::ControllerRuntime},
};

/// Values of the argument `is_leader` of a refresh.
const LEADER: bool = true;
const FOLLOWER: bool = false;

/// A cluster in memory: results of TokenReviews, and a Secret.
#[derive(Debug, Default)]
pub(super) struct FakeIdentityCluster {
    tokens: Mutex<BTreeMap<String, TokenReviewResult>>,
    secret: Mutex<Option<(String, u64)>>,
    bundle: Mutex<String>,
    reviews: AtomicUsize,
    /// True if the next load returns the state before the Secret was made.
    loads_old_state: AtomicBool,
}

impl FakeIdentityCluster {
    /// Returns the bundle that was published last.
    pub(super) fn bundle(&self) -> String {
        self.bundle.lock().expect("no panic").clone()
    }

    /// Replaces the text of the Secret; `None`: there is none.
    pub(super) fn set_secret(&self, text: Option<&str>) {
        *self.secret.lock().expect("no panic") = text.map(|it| (it.to_owned(), 1));
    }

    fn add_token(&self, token: &str, account: &str, node: &str, pod: &str) {
        let extra = [("pod-name", pod), ("pod-uid", "0c7f"), ("node-name", node)];
        let extra_entry = |(key, value): (&str, &str)| {
            (format!("authentication.kubernetes.io/{key}"), vec![value.to_owned()])
        };
        let reviewed = TokenReviewResult {
            is_authentic: true,
            audiences: vec![token_review::AUDIENCE.into()],
            user: format!("system:serviceaccount:{account}"),
            extra: extra.map(extra_entry).into(),
        };
        self.tokens.lock().expect("no panic").insert(token.into(), reviewed);
    }
}

#[tonic::async_trait]
impl TokenReviewer for FakeIdentityCluster {
    async fn review(&self, token: &str) -> Result<TokenReviewResult, AuthorityStoreError> {
        self.reviews.fetch_add(1, Ordering::Relaxed);
        if token == "broken" {
            return Err("no API server".into());
        }
        Ok(self.tokens.lock().expect("no panic").get(token).cloned().unwrap_or_default())
    }
}

#[tonic::async_trait]
impl authority_store::AuthorityStore for FakeIdentityCluster {
    async fn load(&self) -> Result<Option<(String, String)>, AuthorityStoreError> {
        if self.loads_old_state.swap(false, Ordering::Relaxed) {
            return Ok(None);
        }
        let secret = self.secret.lock().expect("no panic").clone();
        Ok(secret.map(|(text, version)| (text, version.to_string())))
    }

    async fn save(&self, text: &str, version: Option<&str>) -> Result<(), AuthorityStoreError> {
        let mut secret = self.secret.lock().expect("no panic");
        let now = secret.as_ref().map(|(_, version)| version.to_string());
        if now.as_deref() != version {
            return Err("conflict".into());
        }
        let next = secret.as_ref().map_or(1, |(_, version)| version + 1);
        *secret = Some((text.to_owned(), next));
        Ok(())
    }

    async fn publish(&self, bundle: &str) -> Result<(), AuthorityStoreError> {
        bundle.clone_into(&mut self.bundle.lock().expect("no panic"));
        Ok(())
    }
}

fn controller_identity(pod: &str) -> CertificateIdentity {
    CertificateIdentity::new(Component::Controller, "n1", pod, "c0").expect("an identity")
}

fn authority_manager(cluster: &Arc<FakeIdentityCluster>, pod: &str) -> Arc<AuthorityManager> {
    AuthorityManager::new(Arc::<FakeIdentityCluster>::clone(cluster), controller_identity(pod))
}

/// A replica of the controller that serves over TLS.
struct IdentityFixture {
    cluster: Arc<FakeIdentityCluster>,
    manager: Arc<AuthorityManager>,
    address: SocketAddr,
    stop: CancellationToken,
}

impl IdentityFixture {
    async fn new() -> Self {
        let cluster = Arc::new(FakeIdentityCluster::default());
        cluster.add_token("agent-n1", "knative-serving:rouse-agent", "n1", "rouse-agent-1");
        cluster.add_token("activator", "knative-serving:activator", "n1", "activator-1");
        cluster.add_token("autoscaler", "knative-serving:autoscaler", "n1", "autoscaler-1");
        cluster.add_token("other-account", "default:default", "n1", "shell");
        cluster.add_token("other-audience", "knative-serving:rouse-agent", "n1", "rouse-agent-1");
        if let Some(token) = cluster.tokens.lock().expect("no panic").get_mut("other-audience") {
            token.audiences = vec!["https://kubernetes".into()];
        }
        let manager = authority_manager(&cluster, "controller-1");
        manager.refresh(SystemTime::now(), LEADER).await.expect("an authority");
        let reviewer = Arc::<FakeIdentityCluster>::clone(&cluster);
        let issuer = CertificateIssuer::new(Arc::clone(&manager), reviewer, "knative-serving");
        let machine = ControllerStateMachine::new(ClusterState::default(), Outbox::new());
        let shared =
            Arc::new(ControllerRuntime::new(machine, watch::channel(LocalNodeSpec::default()).0));
        let at = TcpListener::bind("127.0.0.1:0").await.expect("a port").local_addr();
        let (at, stop) = (at.expect("an address"), CancellationToken::new());
        let (url, ending) = (format!("https://{at}"), stop.clone());
        tokio::spawn(async move {
            grpc_services::serve_with_issuer(shared, &url, Some(&issuer), ending).await
        });
        while tokio::net::TcpStream::connect(at).await.is_err() {
            tokio::task::yield_now().await;
        }
        Self { cluster, manager, address: at, stop }
    }

    fn replica_resolver(&self, credentials: &Arc<TlsCredentials>) -> Arc<ReplicaResolver> {
        ReplicaResolver::with_credentials(
            Component::Controller,
            &format!("https://{}", self.address),
            Some(credentials),
        )
    }

    /// Credentials that trust the cluster's authorities and present no certificate.
    fn trust_only_credentials(&self) -> Arc<TlsCredentials> {
        let credentials = TlsCredentials::new();
        let signing = self.manager.signing().expect("an authority");
        credentials.set_authorities(&signing.authorities).expect("trusted");
        credentials
    }

    async fn dial_without_certificate(&self) -> Channel {
        self.replica_resolver(&self.trust_only_credentials())
            .dial_without_certificate()
            .await
            .expect("a connection")
    }

    async fn issue(&self, token: &str, request: Vec<u8>) -> Result<IssueReply, Code> {
        let request = IssueRequest { token: token.into(), request };
        let response =
            IdentityClient::new(self.dial_without_certificate().await).issue(request).await;
        response.map(tonic::Response::into_inner).map_err(|status| status.code())
    }

    /// Credentials of the component that has this token.
    async fn component_credentials(&self, token: &str) -> Arc<TlsCredentials> {
        let (key, request) = certificate_request();
        let reply = self.issue(token, request).await.expect("a certificate");
        let credentials = self.trust_only_credentials();
        let chain = reply.chain.into_iter().map(Into::into).collect();
        credentials.set_certificate(chain, key.serialize_der().into()).expect("shown");
        credentials
    }

    async fn dial(&self, credentials: &Arc<TlsCredentials>) -> Channel {
        self.replica_resolver(credentials).dial_with_certificate().await.expect("a connection")
    }
}

impl Drop for IdentityFixture {
    fn drop(&mut self) {
        self.stop.cancel();
    }
}

fn certificate_request() -> (KeyPair, Vec<u8>) {
    let key = KeyPair::generate().expect("a key");
    let request = CertificateParams::default().serialize_request(&key).expect("a request");
    let der = request.der().to_vec();
    (key, der)
}

fn subscriber(role: ClientComponent, name: &str, node: &str) -> ComponentReplica {
    ComponentReplica { role, name: name.into(), node: node.into() }
}

async fn watch_error(channel: Channel, subscriber: ComponentReplica) -> Option<Code> {
    let watched = RoutesClient::new(channel).watch(raw::Subscriber::from(subscriber)).await;
    watched.err().map(|status| status.code())
}

async fn report_error(channel: Channel, items: Vec<PodReportItem>) -> Option<Code> {
    let items = futures::stream::iter(items.into_iter().map(raw::PodItem::from));
    let reported = PodsClient::new(channel).report(items).await;
    reported.err().map(|status| status.code())
}

async fn decide_error(channel: Channel, subscriber: ComponentReplica) -> Option<Code> {
    let items = futures::stream::iter([raw::ScaleItem::from(ScaleItem::Sender(subscriber))]);
    let decided = ScaleClient::new(channel).decide(items).await;
    decided.err().map(|status| status.code())
}

#[tokio::test]
async fn each_component_may_do_its_own_work() {
    let fixture = IdentityFixture::new().await;
    let (agent, activator) = (
        subscriber(ClientComponent::Agent, "n1", "n1"),
        subscriber(ClientComponent::Activator, "activator-1", ""),
    );
    let removed = PodReportItem::Removed("p".into());
    let credentials = fixture.component_credentials("agent-n1").await;
    assert_eq!(watch_error(fixture.dial(&credentials).await, agent.clone()).await, None);
    let items = vec![PodReportItem::Sender(agent), removed];
    assert_eq!(report_error(fixture.dial(&credentials).await, items).await, None);
    let credentials = fixture.component_credentials("activator").await;
    assert_eq!(watch_error(fixture.dial(&credentials).await, activator.clone()).await, None);
    let items = vec![PodReportItem::Sender(activator), PodReportItem::DrainAck("p".into())];
    assert_eq!(report_error(fixture.dial(&credentials).await, items).await, None);
    let credentials = fixture.component_credentials("autoscaler").await;
    let autoscaler = subscriber(ClientComponent::Autoscaler, "autoscaler-1", "");
    assert_eq!(decide_error(fixture.dial(&credentials).await, autoscaler).await, None);
}

#[tokio::test]
async fn no_component_may_do_anothers_work() {
    let fixture = IdentityFixture::new().await;
    let denied = Some(Code::PermissionDenied);
    let credentials = fixture.component_credentials("agent-n1").await;
    // An agent as that of another node; as an activator; as an autoscaler.
    assert_eq!(
        watch_error(
            fixture.dial(&credentials).await,
            subscriber(ClientComponent::Agent, "n2", "n2")
        )
        .await,
        denied
    );
    let other = vec![PodReportItem::Sender(subscriber(ClientComponent::Agent, "n2", "n2"))];
    assert_eq!(report_error(fixture.dial(&credentials).await, other).await, denied);
    let other = subscriber(ClientComponent::Activator, "activator-1", "n1");
    assert_eq!(watch_error(fixture.dial(&credentials).await, other).await, denied);
    assert_eq!(
        decide_error(
            fixture.dial(&credentials).await,
            subscriber(ClientComponent::Agent, "n1", "n1")
        )
        .await,
        denied
    );
    let other = subscriber(ClientComponent::Autoscaler, "autoscaler-1", "");
    assert_eq!(decide_error(fixture.dial(&credentials).await, other).await, denied);
    // An activator that reports pods.
    let credentials = fixture.component_credentials("activator").await;
    let sender = PodReportItem::Sender(subscriber(ClientComponent::Activator, "activator-1", "n1"));
    let items = vec![sender, PodReportItem::Removed("p".into())];
    assert_eq!(report_error(fixture.dial(&credentials).await, items).await, denied);
    // An autoscaler that reports at all.
    let credentials = fixture.component_credentials("autoscaler").await;
    let items =
        vec![PodReportItem::Sender(subscriber(ClientComponent::Autoscaler, "autoscaler-1", ""))];
    assert_eq!(report_error(fixture.dial(&credentials).await, items).await, denied);
}

#[tokio::test]
async fn without_a_certificate_only_a_certificate_can_be_requested() {
    let fixture = IdentityFixture::new().await;
    let (agent, refused) =
        (subscriber(ClientComponent::Agent, "n1", "n1"), Some(Code::Unauthenticated));
    assert_eq!(watch_error(fixture.dial_without_certificate().await, agent.clone()).await, refused);
    let items = vec![PodReportItem::Sender(agent.clone())];
    assert_eq!(report_error(fixture.dial_without_certificate().await, items).await, refused);
    assert_eq!(decide_error(fixture.dial_without_certificate().await, agent).await, refused);
    assert!(fixture.issue("agent-n1", certificate_request().1).await.is_ok());
}

#[tokio::test]
async fn a_token_of_no_component_gets_no_certificate() {
    let fixture = IdentityFixture::new().await;
    for token in ["", "unknown", "other-account", "other-audience"] {
        let refused = fixture.issue(token, certificate_request().1).await.err();
        assert_eq!(refused, Some(Code::Unauthenticated), "{token:?}");
    }
    assert_eq!(
        fixture.issue("broken", certificate_request().1).await.err(),
        Some(Code::Unavailable)
    );
    // Without its pod the token is invalid, and no second certificate is issued for it.
    assert!(fixture.issue("agent-n1", certificate_request().1).await.is_ok());
    fixture.cluster.tokens.lock().expect("no panic").clear();
    assert_eq!(
        fixture.issue("agent-n1", certificate_request().1).await.err(),
        Some(Code::Unauthenticated)
    );
}

#[tokio::test]
async fn a_certificate_states_what_the_api_server_knows_and_nothing_requested() {
    let fixture = IdentityFixture::new().await;
    let key = KeyPair::generate().expect("a key");
    let mut params = CertificateParams::default();
    let requested_name = controller_identity("controller-1").to_string().try_into().expect("ASCII");
    params.subject_alt_names = vec![rcgen::SanType::URI(requested_name)];
    params.is_ca = rcgen::IsCa::Ca(rcgen::BasicConstraints::Unconstrained);
    let request = params.serialize_request(&key).expect("a request").der().to_vec();
    let reply = fixture.issue("agent-n1", request).await.expect("a certificate");
    let credentials = fixture.trust_only_credentials();
    let chain = reply.chain.into_iter().map(Into::into).collect();
    let identity = credentials.set_certificate(chain, key.serialize_der().into()).expect("shown");
    assert_eq!(identity.to_string(), "spiffe://rouse/agent/n1/rouse-agent-1/0c7f");
}

#[tokio::test]
async fn oversized_or_invalid_requests_are_refused_before_review() {
    let fixture = IdentityFixture::new().await;
    let reviews = fixture.cluster.reviews.load(Ordering::Relaxed);
    let large = fixture.issue("agent-n1", vec![0; MAX_REQUEST_BYTES + 1]).await.err();
    assert_eq!(large, Some(Code::InvalidArgument));
    let huge = fixture.issue("agent-n1", vec![0; 1 << 20]).await.err();
    assert!(huge.is_some(), "{huge:?}");
    let token = "x".repeat(MAX_TOKEN_BYTES + 1);
    assert_eq!(
        fixture.issue(&token, certificate_request().1).await.err(),
        Some(Code::InvalidArgument)
    );
    assert_eq!(fixture.cluster.reviews.load(Ordering::Relaxed), reviews, "no token was reviewed");
    for invalid in [vec![], vec![0; 300], certificate_request().1[..100].to_vec()] {
        assert_eq!(fixture.issue("agent-n1", invalid).await.err(), Some(Code::InvalidArgument));
    }
    // A request for a key that its sender does not have.
    let mut forged = certificate_request().1;
    let last = forged.len() - 1;
    forged[last] ^= 1;
    assert_eq!(fixture.issue("agent-n1", forged).await.err(), Some(Code::InvalidArgument));
}

#[tokio::test]
async fn an_agent_enrolls_subscribes_and_reports() {
    let fixture = IdentityFixture::new().await;
    let folder = std::env::temp_dir().join(format!("rouse-identity-{}", std::process::id()));
    std::fs::create_dir_all(&folder).expect("a folder");
    std::fs::write(folder.join("token"), "agent-n1").expect("written");
    let bundle = fixture.cluster.bundle.lock().expect("no panic").clone();
    std::fs::write(folder.join("ca.pem"), bundle).expect("written");
    let (credentials, stop) = (TlsCredentials::new(), fixture.stop.clone());
    let resolver = fixture.replica_resolver(&credentials);
    let files = enrollment::EnrollmentFiles::in_folder(&folder);
    tokio::spawn(enrollment::keep_enrolled(
        credentials,
        Arc::clone(&resolver),
        files,
        stop.clone(),
    ));
    let link = ComponentLink::with_resolver(
        Arc::clone(&resolver),
        subscriber(ClientComponent::Agent, "n1", "n1"),
        stop.clone(),
    );
    let reports = Arc::new(ComponentLink::with_resolver(
        resolver.clone(),
        subscriber(ClientComponent::Agent, "n1", "n1"),
        stop,
    ));
    let link = link.with_listed_replicas(ServerComponent::Controller, resolver);
    let reporting = Arc::clone(&reports);
    tokio::spawn(async move {
        reporting.report_pods(&Outbox::<PodReportKey, PodReportItem>::new()).await
    });
    let (send, mut tables) = tokio::sync::mpsc::channel(4);
    tokio::spawn(async move { link.watch_routes(|view, _| _ = send.try_send(view.version)).await });
    assert!(tables.recv().await.is_some());
    while !reports.is_connected() {
        tokio::task::yield_now().await;
    }
    std::fs::remove_dir_all(folder).expect("removed");
}

#[tokio::test]
async fn only_the_leader_makes_authorities_and_all_sign_with_them() {
    let cluster = Arc::new(FakeIdentityCluster::default());
    let (one, two) =
        (authority_manager(&cluster, "controller-1"), authority_manager(&cluster, "controller-2"));
    let now = SystemTime::now();
    assert!(matches!(
        two.refresh(now, FOLLOWER).await,
        Err(authority_store::AuthorityError::NoAuthority)
    ));
    one.refresh(now, LEADER).await.expect("made");
    two.refresh(now, FOLLOWER).await.expect("read");
    let signing =
        |manager: &AuthorityManager| manager.signing().expect("signs").authorities.clone();
    assert_eq!(signing(&one), signing(&two));
    assert_eq!(two.credentials().identity().as_deref(), Some(&controller_identity("controller-2")));
    // Of two that both believe to lead, the second keeps the authorities, also if its view is old.
    let secret = cluster.secret.lock().expect("no panic").clone();
    two.refresh(now, LEADER).await.expect("kept");
    cluster.loads_old_state.store(true, Ordering::Relaxed);
    let refused = two.refresh(now, LEADER).await.expect_err("a conflict");
    assert!(matches!(refused, authority_store::AuthorityError::Store { .. }), "{refused}");
    assert_eq!(*cluster.secret.lock().expect("no panic"), secret);
}

#[tokio::test]
async fn authorities_are_replaced_with_an_overlap() {
    let cluster = Arc::new(FakeIdentityCluster::default());
    let manager = authority_manager(&cluster, "controller-1");
    let (begin, day) = (SystemTime::now(), Duration::from_secs(86_400));
    let mut steps = Vec::new();
    for at in [begin, begin + day * 240, begin + day * 240 + day / 12, begin + day * 241] {
        manager.refresh(at, LEADER).await.expect("refreshed");
        let trusted = manager.signing().expect("signs").authorities.len();
        let published = cluster.bundle.lock().expect("no panic").matches("BEGIN").count();
        assert_eq!(trusted, published);
        let text = cluster.secret.lock().expect("no panic").clone().expect("a Secret").0;
        let all: CertificateAuthorities = serde_json::from_str(&text).expect("authorities");
        let at_s = at.duration_since(UNIX_EPOCH).expect("after 1970").as_secs();
        let signer = all.signing_authority(&COMPONENT_SCHEDULE, at_s).expect("signs").made_s;
        let newest = all.all().last().expect("one").made_s;
        steps.push((trusted, signer == newest));
    }
    assert_eq!(steps, [(1, true), (2, false), (2, true), (1, true)]);
}

#[tokio::test]
async fn a_deleted_config_map_of_authorities_is_created_again() {
    let cluster = Arc::new(FakeIdentityCluster::default());
    let manager = authority_manager(&cluster, "controller-1");
    let now = SystemTime::now();
    manager.refresh(now, LEADER).await.expect("made");
    let bundle = std::mem::take(&mut *cluster.bundle.lock().expect("no panic"));
    manager.refresh(now, LEADER).await.expect("refreshed");
    assert_eq!(*cluster.bundle.lock().expect("no panic"), bundle);
}

#[tokio::test]
async fn a_secret_that_cannot_be_read_is_not_overwritten() {
    let cluster = Arc::new(FakeIdentityCluster::default());
    *cluster.secret.lock().expect("no panic") = Some(("not json".into(), 7));
    let manager = authority_manager(&cluster, "controller-1");
    let refused = manager.refresh(SystemTime::now(), LEADER).await.expect_err("unreadable");
    assert!(matches!(refused, authority_store::AuthorityError::InvalidSecret(_)), "{refused}");
    assert_eq!(cluster.secret.lock().expect("no panic").as_ref().map(|it| it.1), Some(7));
}
