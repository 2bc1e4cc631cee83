use std::{
    io,
    net::SocketAddr,
    path::PathBuf,
    sync::atomic::{AtomicUsize, Ordering},
    time::{Duration, SystemTime},
};

use rcgen::{
    BasicConstraints, CertificateParams, CertifiedIssuer, ExtendedKeyUsagePurpose, IsCa, KeyPair,
    SanType,
};
use tokio::{
    io::AsyncReadExt as _,
    net::{TcpListener, TcpStream},
    sync::mpsc,
};
use tokio_util::sync::CancellationToken;
use tonic::{Code, Request, Response, Status, Streaming};

use super::{accept::AcceptLimits, peer::*, *};
use crate::{
    link::{self, ComponentLink, PodReportKey, ReplicaResolver, TlsAdmission},
    outbox::Outbox,
    wire::{
        ClientComponent, ComponentReplica, PodReportItem,
        raw::{
            self,
            identity_server::{Identity as Issuing, IdentityServer},
            pods_client::PodsClient,
            pods_server::{Pods, PodsServer},
        },
    },
};

/// Certificate authority of one test.
struct AuthorityFixture(CertifiedIssuer<'static, KeyPair>);

impl AuthorityFixture {
    fn new() -> Self {
        let mut params = CertificateParams::default();
        params.is_ca = IsCa::Ca(BasicConstraints::Constrained(0));
        let key = KeyPair::generate().expect("a key");
        Self(CertifiedIssuer::self_signed(params, key).expect("a certificate"))
    }

    fn der(&self) -> CertificateDer<'static> {
        self.0.der().clone()
    }

    /// Signs a certificate for these names, valid from an hour ago to `end`.
    fn sign(&self, key: &KeyPair, names: &[&str], end: SystemTime) -> CertificateDer<'static> {
        let mut params = CertificateParams::default();
        let uri = |name: &&str| SanType::URI((*name).try_into().expect("ASCII"));
        params.subject_alt_names = names.iter().map(uri).collect();
        params.not_before = (SystemTime::now() - Duration::from_secs(3_600)).into();
        params.not_after = end.into();
        params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ClientAuth];
        // The controller adds server authentication in the same way.
        if names.contains(&CONTROLLER) {
            params.extended_key_usages.push(ExtendedKeyUsagePurpose::ServerAuth);
        }
        params.signed_by(key, &self.0).expect("signed").der().clone()
    }

    /// Returns credentials that present `name` and trust this authority.
    fn credentials(&self, name: &str) -> Arc<TlsCredentials> {
        let all = TlsCredentials::new();
        all.set_authorities(&[self.der()]).expect("trusted");
        self.issue(&all, name, later());
        all
    }

    fn issue(&self, to: &TlsCredentials, name: &str, end: SystemTime) {
        let key = KeyPair::generate().expect("a key");
        let chain = vec![self.sign(&key, &[name], end)];
        to.set_certificate(chain, PrivatePkcs8KeyDer::from(key.serialize_der())).expect("shown");
    }
}

fn later() -> SystemTime {
    SystemTime::now() + Duration::from_secs(3_600)
}

const CONTROLLER: &str = "spiffe://rouse/controller/n1/controller-1/c1";
const AGENT: &str = "spiffe://rouse/agent/n1/agent-1/a1";
const ACTIVATOR: &str = "spiffe://rouse/activator/n1/activator-1/b1";

/// Server that records the sender of each report, or the reason of its refusal. It issues certificates for the token.
#[derive(Clone)]
struct FakeTlsServer {
    reports: mpsc::Sender<(TlsPeer, String)>,
    authority: Arc<AuthorityFixture>,
    issued: Arc<AtomicUsize>,
    refused: Arc<AtomicUsize>,
    lifetime: Duration,
}

#[tonic::async_trait]
impl Pods for FakeTlsServer {
    async fn report(
        &self,
        request: Request<Streaming<raw::PodItem>>,
    ) -> Result<Response<raw::Empty>, Status> {
        let peer = request_peer(&request);
        let mut items = request.into_inner();
        while let Some(item) = items.message().await? {
            let Ok(PodReportItem::Sender(sender)) = PodReportItem::try_from(item) else { continue };
            peer.check_identity(&sender).map_err(|denied| denied_status(&denied))?;
            let _full = self.reports.try_send((peer.clone(), sender.name));
        }
        Ok(Response::new(raw::Empty {}))
    }
}

#[tonic::async_trait]
impl Issuing for FakeTlsServer {
    async fn issue(
        &self,
        request: Request<raw::IssueRequest>,
    ) -> Result<Response<raw::IssueReply>, Status> {
        let request = request.into_inner();
        if request.token != "good" {
            self.refused.fetch_add(1, Ordering::Relaxed);
            return Err(Status::unauthenticated("unknown token"));
        }
        self.issued.fetch_add(1, Ordering::Relaxed);
        let request = rcgen::CertificateSigningRequestParams::from_der(&request.request.into());
        let request = request.map_err(|error| Status::invalid_argument(error.to_string()))?;
        let end = SystemTime::now() + self.lifetime;
        let mut params = CertificateParams::default();
        params.subject_alt_names = vec![SanType::URI(AGENT.try_into().expect("ASCII"))];
        params.not_after = end.into();
        let signed = params.signed_by(&request.public_key, &self.authority.0).expect("signed");
        let end = end.duration_since(SystemTime::UNIX_EPOCH).expect("after 1970");
        Ok(Response::new(raw::IssueReply {
            chain: vec![signed.der().to_vec()],
            authorities: vec![self.authority.der().to_vec()],
            not_after_ms: u64::try_from(end.as_millis()).expect("small"),
        }))
    }
}

struct TlsFixture {
    authority: Arc<AuthorityFixture>,
    at: SocketAddr,
    reports: mpsc::Receiver<(TlsPeer, String)>,
    issued: Arc<AtomicUsize>,
    refused: Arc<AtomicUsize>,
    server_credentials: Arc<TlsCredentials>,
    stop: CancellationToken,
}

impl TlsFixture {
    async fn new() -> Self {
        Self::with(AcceptLimits::default(), Duration::from_secs(3_600)).await
    }

    async fn with(limits: AcceptLimits, lifetime: Duration) -> Self {
        let authority = Arc::new(AuthorityFixture::new());
        let shown = authority.credentials(CONTROLLER);
        let stop = CancellationToken::new();
        let (send, reports) = mpsc::channel(16);
        let (issued, refused) = (Arc::new(AtomicUsize::new(0)), Arc::new(AtomicUsize::new(0)));
        let server = FakeTlsServer {
            reports: send,
            authority: Arc::clone(&authority),
            issued: Arc::clone(&issued),
            refused: Arc::clone(&refused),
            lifetime,
        };
        let at = TcpListener::bind("127.0.0.1:0").await.expect("a port").local_addr();
        let at = at.expect("an address");
        let router = link::server_builder()
            .add_service(PodsServer::new(server.clone()))
            .add_service(IdentityServer::new(server));
        let admission = TlsAdmission {
            credentials: Arc::clone(&shown),
            allows_anonymous: true,
            limits,
            known_addresses: None,
        };
        let (to, ending) = (format!("https://{at}"), stop.clone());
        tokio::spawn(
            async move { link::serve_with_tls(&to, router, Some(&admission), ending).await },
        );
        while TcpStream::connect(at).await.is_err() {
            tokio::task::yield_now().await;
        }
        Self { authority, at, reports, issued, refused, server_credentials: shown, stop }
    }

    fn resolver(&self, credentials: &Arc<TlsCredentials>) -> Arc<ReplicaResolver> {
        ReplicaResolver::with_credentials(
            Component::Controller,
            &format!("https://{}", self.at),
            Some(credentials),
        )
    }

    /// Reports as `sender`. Returns the result of the call.
    async fn report(
        &self,
        credentials: &Arc<TlsCredentials>,
        sender: ComponentReplica,
    ) -> Result<(), Code> {
        let (server, with_certificate) = (Component::Controller, true);
        let channel = link::dial::dial_tls(self.at, credentials, server, with_certificate).await;
        let channel = channel.map_err(|_unreachable| Code::Unavailable)?;
        let items = futures::stream::iter([raw::PodItem::from(PodReportItem::Sender(sender))]);
        let done = PodsClient::new(channel).report(items).await;
        done.map(drop).map_err(|status| status.code())
    }

    /// Returns a link that reports until the test ends.
    fn link(&self, credentials: &Arc<TlsCredentials>) -> Arc<ComponentLink> {
        let link = Arc::new(ComponentLink::with_resolver(
            self.resolver(credentials),
            agent("n1"),
            self.stop.clone(),
        ));
        let (outbox, reporting) = (Outbox::<PodReportKey, PodReportItem>::new(), Arc::clone(&link));
        tokio::spawn(async move { reporting.report_pods(&outbox).await });
        link
    }
}

impl Drop for TlsFixture {
    fn drop(&mut self) {
        self.stop.cancel();
    }
}

fn agent(node: &str) -> ComponentReplica {
    ComponentReplica { role: ClientComponent::Agent, name: node.into(), node: node.into() }
}

fn activator(name: &str) -> ComponentReplica {
    ComponentReplica { role: ClientComponent::Activator, name: name.into(), node: "n1".into() }
}

#[tokio::test]
async fn both_sides_know_each_other() {
    let mut fixture = TlsFixture::new().await;
    let credentials = fixture.authority.credentials(AGENT);
    assert_eq!(fixture.report(&credentials, agent("n1")).await, Ok(()));
    let identity = Arc::new(AGENT.parse().expect("an identity"));
    assert_eq!(fixture.reports.recv().await, Some((TlsPeer::Authenticated(identity), "n1".into())));
}

#[tokio::test]
async fn no_client_may_claim_another_identity() {
    let fixture = TlsFixture::new().await;
    let credentials = fixture.authority.credentials(AGENT);
    for other in [agent("n2"), activator("agent-1"), activator("activator-1")] {
        assert_eq!(fixture.report(&credentials, other).await, Err(Code::PermissionDenied));
    }
    let credentials = fixture.authority.credentials(ACTIVATOR);
    assert_eq!(fixture.report(&credentials, agent("n1")).await, Err(Code::PermissionDenied));
    assert_eq!(fixture.report(&credentials, activator("activator-1")).await, Ok(()));
}

#[tokio::test]
async fn without_a_certificate_nothing_can_be_reported() {
    let fixture = TlsFixture::new().await;
    let nobody = TlsCredentials::new();
    nobody.set_authorities(&[fixture.authority.der()]).expect("trusted");
    assert_eq!(fixture.report(&nobody, agent("n1")).await, Err(Code::Unauthenticated));
}

#[tokio::test]
async fn a_certificate_without_a_trusted_authority_is_refused() {
    let fixture = TlsFixture::new().await;
    let refused = async |credentials: &Arc<TlsCredentials>| {
        fixture.report(credentials, agent("n1")).await.expect_err("refused");
    };
    // Signed by another authority, though its holder trusts this one.
    let foreign = AuthorityFixture::new().credentials(AGENT);
    foreign.set_authorities(&[fixture.authority.der()]).expect("trusted");
    refused(&foreign).await;
    // An expired certificate.
    let ended = fixture.authority.credentials(AGENT);
    fixture.authority.issue(&ended, AGENT, SystemTime::now() - Duration::from_secs(60));
    refused(&ended).await;
    // A certificate without an identity, and one with two.
    for names in [&["spiffe://elsewhere/agent"][..], &[AGENT, ACTIVATOR]] {
        let key = KeyPair::generate().expect("a key");
        let chain = vec![fixture.authority.sign(&key, names, later())];
        let shown = ended.set_certificate(chain, PrivatePkcs8KeyDer::from(key.serialize_der()));
        assert!(shown.is_err(), "{names:?}");
    }
    // A key that does not belong to the certificate.
    let (key, other) = (KeyPair::generate().expect("a key"), KeyPair::generate().expect("a key"));
    let chain = vec![fixture.authority.sign(&key, &[AGENT], later())];
    assert!(ended.set_certificate(chain, PrivatePkcs8KeyDer::from(other.serialize_der())).is_err());
}

#[tokio::test]
async fn a_certificate_cannot_sign_others() {
    let fixture = TlsFixture::new().await;
    let key = KeyPair::generate().expect("a key");
    let own = fixture.authority.sign(&key, &[AGENT], later());
    let issuer = rcgen::Issuer::from_ca_cert_der(&own, key).expect("an issuer");
    let forged = KeyPair::generate().expect("a key");
    let mut params = CertificateParams::default();
    params.subject_alt_names = vec![SanType::URI(CONTROLLER.try_into().expect("ASCII"))];
    let certificate = params.signed_by(&forged, &issuer).expect("signed").der().clone();
    let credentials = TlsCredentials::new();
    credentials.set_authorities(&[fixture.authority.der()]).expect("trusted");
    let chain = vec![certificate, own];
    credentials
        .set_certificate(chain, PrivatePkcs8KeyDer::from(forged.serialize_der()))
        .expect("shown");
    fixture.report(&credentials, agent("n1")).await.expect_err("refused");
}

#[tokio::test]
async fn a_client_talks_to_no_impostor() {
    let fixture = TlsFixture::new().await;
    let credentials = fixture.authority.credentials(AGENT);
    // The server has a valid certificate, but not of a controller.
    fixture.authority.issue(&fixture.server_credentials, ACTIVATOR, later());
    assert_eq!(fixture.report(&credentials, agent("n1")).await, Err(Code::Unavailable));
    // A controller's certificate of another authority.
    let foreign = AuthorityFixture::new();
    foreign.issue(&fixture.server_credentials, CONTROLLER, later());
    assert_eq!(fixture.report(&credentials, agent("n1")).await, Err(Code::Unavailable));
    fixture.authority.issue(&fixture.server_credentials, CONTROLLER, later());
    assert_eq!(fixture.report(&credentials, agent("n1")).await, Ok(()));
}

#[tokio::test]
async fn activators_authenticate_each_other_by_client_certificates() {
    let fixture = TlsFixture::new().await;
    let own = fixture.authority.credentials("spiffe://rouse/activator/n2/activator-2/b2");
    let with_certificate = true;
    let dials =
        async |to| link::dial::dial_tls(fixture.at, &own, to, with_certificate).await.is_ok();
    fixture.authority.issue(&fixture.server_credentials, ACTIVATOR, later());
    assert!(dials(Component::Activator).await);
    for other in [Component::Controller, Component::Autoscaler, Component::Agent] {
        assert!(!dials(other).await, "an activator is no {other}");
    }
    for other in [AGENT, CONTROLLER] {
        fixture.authority.issue(&fixture.server_credentials, other, later());
        assert!(!dials(Component::Activator).await, "{other} is no activator");
    }
    AuthorityFixture::new().issue(&fixture.server_credentials, ACTIVATOR, later());
    assert!(!dials(Component::Activator).await, "on another authority's word");
}

#[tokio::test]
async fn a_silent_client_is_disconnected() {
    let limits = AcceptLimits {
        handshake_timeout: Duration::from_millis(200),
        max_anonymous: 4,
        max_anonymous_per_address: 2,
        ..AcceptLimits::default()
    };
    let fixture = TlsFixture::with(limits, Duration::from_secs(3_600)).await;
    // Connections without a handshake are closed, with or without a free place.
    let mut buffer = [0; 1];
    for _ in 0..3 {
        let mut stream = TcpStream::connect(fixture.at).await.expect("accepted");
        let end = stream.read(&mut buffer).await;
        assert!(matches!(end, Ok(0) | Err(_)), "{end:?}");
    }
}

#[tokio::test]
async fn a_client_without_a_certificate_is_disconnected_although_its_handshake_succeeded() {
    // A handshake takes a busy machine longer than the lifetime after it.
    let limits = AcceptLimits {
        handshake_timeout: Duration::from_secs(60),
        anonymous_lifetime: Duration::from_millis(200),
        ..AcceptLimits::default()
    };
    let mut fixture = TlsFixture::with(limits, Duration::from_secs(3_600)).await;
    let nobody = TlsCredentials::new();
    nobody.set_authorities(&[fixture.authority.der()]).expect("trusted");
    let config = client_config(&nobody, Component::Controller, false);
    let connector = tokio_rustls::TlsConnector::from(Arc::new(config));
    let socket = TcpStream::connect(fixture.at).await.expect("accepted");
    let name = ServerName::from(fixture.at.ip());
    let mut stream = connector.connect(name, socket).await.expect("a handshake");
    let mut all = Vec::new();
    // Settings of the server may come first; only the end matters.
    let _either: io::Result<usize> = stream.read_to_end(&mut all).await;
    // Clients with a certificate are served.
    let credentials = fixture.authority.credentials(AGENT);
    assert_eq!(fixture.report(&credentials, agent("n1")).await, Ok(()));
    assert!(fixture.reports.recv().await.is_some());
}

/// Files in the form in which the platform mounts them.
struct MountedFilesFixture(PathBuf);

impl MountedFilesFixture {
    fn new(
        name: &str,
        token: &str,
        authority: &AuthorityFixture,
    ) -> (Self, crate::enrollment::EnrollmentFiles) {
        let folder = std::env::temp_dir().join(format!("rouse-tls-{name}-{}", std::process::id()));
        std::fs::create_dir_all(&folder).expect("a folder");
        let files = crate::enrollment::EnrollmentFiles {
            token: folder.join("token"),
            authorities: folder.join("ca.pem"),
        };
        std::fs::write(&files.token, token).expect("written");
        std::fs::write(&files.authorities, authority.0.pem()).expect("written");
        (Self(folder), files)
    }
}

impl Drop for MountedFilesFixture {
    fn drop(&mut self) {
        let _gone = std::fs::remove_dir_all(&self.0);
    }
}

fn run_enrollment(
    fixture: &TlsFixture,
    credentials: &Arc<TlsCredentials>,
    files: &crate::enrollment::EnrollmentFiles,
) -> impl Future<Output = ()> + Send + 'static {
    let (credentials, resolver) = (Arc::clone(credentials), fixture.resolver(credentials));
    crate::enrollment::keep_enrolled(credentials, resolver, files.clone(), fixture.stop.clone())
}

#[tokio::test]
async fn a_component_gets_its_certificate_and_its_stream_outlives_renewals() {
    // Certificates of four seconds are replaced about every two seconds.
    let mut fixture = TlsFixture::with(AcceptLimits::default(), Duration::from_secs(4)).await;
    let (_folder, files) = MountedFilesFixture::new("rotate", "good\n", &fixture.authority);
    let credentials = TlsCredentials::new();
    tokio::spawn(run_enrollment(&fixture, &credentials, &files));
    let link = fixture.link(&credentials);
    assert!(fixture.reports.recv().await.is_some());
    let shown = credentials.certified_key().expect("a certificate").cert[0].clone();
    while fixture.issued.load(Ordering::Relaxed) < 4 {
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    // The first certificate has expired by now, but its stream is still open.
    assert_ne!(credentials.certified_key().expect("a certificate").cert[0], shown);
    assert_eq!(link.open_stream_count(), 1);
    assert!(fixture.reports.try_recv().is_err(), "no second stream was opened");
    // On a busy machine a certificate may expire before the next one has come.
    let report = async {
        while fixture.report(&credentials, agent("n1")).await.is_err() {
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    };
    tokio::time::timeout(Duration::from_secs(60), report).await.expect("a certificate in time");
}

#[tokio::test]
async fn a_refused_token_brings_no_certificate_until_the_platform_brings_another() {
    let fixture = TlsFixture::new().await;
    let (_folder, files) = MountedFilesFixture::new("refused", "stolen", &fixture.authority);
    let credentials = TlsCredentials::new();
    tokio::spawn(run_enrollment(&fixture, &credentials, &files));
    while fixture.refused.load(Ordering::Relaxed) == 0 {
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    assert_eq!((credentials.identity(), fixture.issued.load(Ordering::Relaxed)), (None, 0));
    std::fs::write(&files.token, "good").expect("written");
    credentials.wait_for_certificate().await;
    assert_eq!(credentials.identity().map(|it| it.to_string()), Some(AGENT.into()));
}

#[tokio::test]
async fn a_controller_of_another_authority_is_shown_no_token() {
    let fixture = TlsFixture::new().await;
    let (_folder, files) = MountedFilesFixture::new("impostor", "good", &AuthorityFixture::new());
    let credentials = TlsCredentials::new();
    let enrollment = run_enrollment(&fixture, &credentials, &files);
    let _elapsed = tokio::time::timeout(Duration::from_millis(500), enrollment).await;
    assert_eq!(fixture.issued.load(Ordering::Relaxed), 0);
}

#[tokio::test]
async fn authorities_change_with_an_overlap_and_no_stream_breaks() {
    let mut fixture = TlsFixture::new().await;
    let credentials = fixture.authority.credentials(AGENT);
    let link = fixture.link(&credentials);
    assert!(fixture.reports.recv().await.is_some());
    // Both trust both authorities; then each moves to the new one at its own time.
    let next = AuthorityFixture::new();
    for side in [&credentials, &fixture.server_credentials] {
        side.set_authorities(&[fixture.authority.der(), next.der()]).expect("trusted");
    }
    next.issue(&fixture.server_credentials, CONTROLLER, later());
    assert_eq!(fixture.report(&credentials, agent("n1")).await, Ok(()));
    next.issue(&credentials, AGENT, later());
    assert_eq!(fixture.report(&credentials, agent("n1")).await, Ok(()));
    for side in [&credentials, &fixture.server_credentials] {
        side.set_authorities(&[next.der()]).expect("trusted");
    }
    assert_eq!(fixture.report(&credentials, agent("n1")).await, Ok(()));
    // The old authority is no longer trusted.
    let late = fixture.authority.credentials(AGENT);
    late.set_authorities(&[next.der()]).expect("trusted");
    fixture.report(&late, agent("n1")).await.expect_err("refused");
    assert_eq!(link.open_stream_count(), 1);
}
