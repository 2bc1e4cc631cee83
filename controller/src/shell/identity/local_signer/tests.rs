use common::{local_node::LocalNodeSpec, outbox::Outbox};
use rustls::{
    RootCertStore,
    client::{WebPkiServerVerifier, danger::ServerCertVerifier as _},
    crypto::ring,
    pki_types::{CertificateDer, ServerName, UnixTime, pem::PemObject as _},
};
use tokio::sync::watch;

use super::*;
use crate::{
    decide::machine::ControllerStateMachine,
    model::cluster_state::{ClusterState, LocalCertificateState},
    shell::identity::tests::FakeIdentityCluster,
};

/// Values of the argument `is_leader` of a refresh.
const LEADER: bool = true;
const FOLLOWER: bool = false;

fn signer(cluster: &Arc<FakeIdentityCluster>) -> LocalCertificateSigner {
    signer_for(cluster, ClusterState::default())
}

fn signer_for(cluster: &Arc<FakeIdentityCluster>, state: ClusterState) -> LocalCertificateSigner {
    let machine = ControllerStateMachine::new(state, Outbox::new());
    let node_spec = watch::channel(LocalNodeSpec::default()).0;
    let runtime = Arc::new(ControllerRuntime::new(machine, node_spec));
    let store = Arc::<FakeIdentityCluster>::clone(cluster);
    LocalCertificateSigner::new(store, runtime, "cluster.local")
}

/// Returns true if a client that trusts the bundle accepts the certificate for this host.
fn is_accepted(bundle: &str, material: &CertificateMaterial, host: &str) -> bool {
    let mut roots = RootCertStore::empty();
    for authority in CertificateDer::pem_slice_iter(bundle.as_bytes()) {
        roots.add(authority.expect("a certificate")).expect("an authority");
    }
    let provider = Arc::new(ring::default_provider());
    let verifier = WebPkiServerVerifier::builder_with_provider(Arc::new(roots), provider);
    let verifier = verifier.build().expect("an authority is trusted");
    let leaf = CertificateDer::from(material.chain[0].clone());
    let host = ServerName::try_from(host.to_owned()).expect("a host");
    verifier.verify_server_cert(&leaf, &[], &host, &[], UnixTime::now()).is_ok()
}

#[tokio::test]
async fn clients_that_trust_the_bundle_accept_each_name_of_a_service() {
    let cluster = Arc::new(FakeIdentityCluster::default());
    let mut signer = signer(&cluster);
    let now = SystemTime::now();
    signer.refresh(now, LEADER).await.expect("an authority");
    let authority = signer.authority.as_ref().expect("it signs");
    let hosts = local_hosts(&NamespacedName::new("shop", "web"), "cluster.local");
    let material = authority.sign(&hosts, now).expect("signed");
    let bundle = cluster.bundle();
    for host in ["web.shop", "web.shop.svc", "web.shop.svc.cluster.local"] {
        assert!(is_accepted(&bundle, &material, host), "{host}");
    }
    for host in ["web.other", "shop.web", "a.web.shop"] {
        assert!(!is_accepted(&bundle, &material, host), "{host}");
    }
    common::certificates::load(&material).expect("activators can use it");
}

#[tokio::test]
async fn replicas_sign_with_the_authority_of_the_leader() {
    let cluster = Arc::new(FakeIdentityCluster::default());
    let (mut leader, mut follower) = (signer(&cluster), signer(&cluster));
    let now = SystemTime::now();
    let refused = follower.refresh(now, FOLLOWER).await;
    assert!(matches!(refused, Err(AuthorityError::NoAuthority)), "{refused:?}");
    leader.refresh(now, LEADER).await.expect("an authority");
    follower.refresh(now, FOLLOWER).await.expect("the same authority");
    let hosts = local_hosts(&NamespacedName::new("shop", "web"), "cluster.local");
    let material = follower.authority.expect("it signs").sign(&hosts, now).expect("signed");
    assert!(is_accepted(&cluster.bundle(), &material, "web.shop"));
}

/// A year later the successor is published. It signs only once clients have had two months to trust it.
#[tokio::test]
async fn a_successor_is_published_long_before_it_signs() {
    let cluster = Arc::new(FakeIdentityCluster::default());
    let mut signer = signer(&cluster);
    let made = SystemTime::now();
    signer.refresh(made, LEADER).await.expect("an authority");
    let first_s = unix_seconds(made);
    let rotation = made + Duration::from_secs(LOCAL_SCHEDULE.rotation_age_s);
    let count = || cluster.bundle().matches("BEGIN CERTIFICATE").count();
    signer.refresh(rotation, LEADER).await.expect("a successor");
    assert_eq!((count(), signing_s(&signer)), (2, first_s));
    let overlap = Duration::from_secs(LOCAL_SCHEDULE.overlap_s);
    signer.refresh(rotation + overlap, LEADER).await.expect("the successor signs");
    assert_eq!((count(), signing_s(&signer)), (2, unix_seconds(rotation)));
    signer.refresh(rotation + 2 * overlap, LEADER).await.expect("the first one has ended");
    assert_eq!((count(), signing_s(&signer)), (1, unix_seconds(rotation)));
}

/// Runs one round of a signer, and returns the failure that the machine knows of the service then.
async fn run_round(
    signer: &mut LocalCertificateSigner,
    service: &NamespacedName,
) -> Option<Box<str>> {
    let (wanted, now) = (BTreeMap::from([(service.clone(), 1)]), SystemTime::now());
    signer.try_refresh(LEADER).await;
    signer.sign_due(&wanted, now).await;
    signer.report_lasting_error(&wanted, now);
    signer.runtime.with_machine(|it| it.cluster().local_certificates[service].failure.clone())
}

#[tokio::test]
async fn an_error_that_lasts_is_reported_until_a_certificate_is_signed() {
    let service = NamespacedName::new("shop", "web");
    let wanted =
        LocalCertificateState { request: 1, material: None, is_from_start: true, failure: None };
    let local_certificates = BTreeMap::from([(service.clone(), wanted)]);
    let state = ClusterState { local_certificates, ..ClusterState::default() };
    let cluster = Arc::new(FakeIdentityCluster::default());
    let mut signer = signer_for(&cluster, state);
    cluster.set_secret(Some("no authorities"));
    for _ in 0..3 {
        assert_eq!(run_round(&mut signer, &service).await, None, "it may be brief");
    }
    let failure = run_round(&mut signer, &service).await.unwrap_or_default();
    assert!(failure.starts_with("the Secret of authorities cannot be read"), "{failure}");
    cluster.set_secret(None);
    assert_eq!(run_round(&mut signer, &service).await, None);
    // A certificate that was signed is valid for longer than any number of failed rounds.
    cluster.set_secret(Some("no authorities"));
    for _ in 0..5 {
        assert_eq!(run_round(&mut signer, &service).await, None);
    }
}

fn signing_s(signer: &LocalCertificateSigner) -> u64 {
    signer.authority.as_ref().map_or(0, |it| it.made_s)
}
