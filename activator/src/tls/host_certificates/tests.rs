use std::num::NonZeroU16;

use common::{
    fixtures::certificates::{TestAuthority, TestCertificate},
    wire::{
        CertificateEntry, EdgeSettings, GlobalSettings, PrivateKeyBytes, TlsCipher, TlsMinVersion,
    },
};
use prometheus_client::{encoding::text::encode, registry::Registry};
use rustls::ServerConfig;

use super::*;
use crate::metrics::ActivatorMetrics;

/// Certificates with the registry of their metrics.
struct Fixture {
    certificates: HostCertificates,
    registry: Registry,
    authority: TestAuthority,
}

impl Fixture {
    fn new() -> Self {
        let mut registry = Registry::default();
        let certificates = HostCertificates::new(ActivatorMetrics::register(&mut registry).tls);
        Self { certificates, registry, authority: TestAuthority::new() }
    }

    /// Applies a batch after a snapshot.
    fn apply(&self, changes: impl IntoIterator<Item = RouteChange>) {
        self.apply_batch(&batch(false, changes));
    }

    fn apply_snapshot(&self, changes: impl IntoIterator<Item = RouteChange>) {
        self.apply_batch(&batch(true, changes));
    }

    fn apply_batch(&self, batch: &RouteBatch) {
        let removed = self.certificates.apply_batch(batch);
        self.certificates.remove(&removed);
    }

    /// Settings of the handshakes of a mapping with this Secret.
    fn own(&self, secret: &str) -> Option<Arc<ServerConfig>> {
        self.choose(&[name(secret)], Some("mapped.example"))
    }

    /// Settings of the handshakes of a host without a mapping.
    fn shared(&self, host: &str) -> Option<Arc<ServerConfig>> {
        self.choose(&[], Some(host))
    }

    /// Settings of the handshakes of clients that name no host.
    fn unnamed(&self) -> Option<Arc<ServerConfig>> {
        self.choose(&[], None)
    }

    fn choose(&self, own: &[NamespacedName], host: Option<&str>) -> Option<Arc<ServerConfig>> {
        let chosen = self.certificates.choose_certificate(own, host, |_any_key| true);
        chosen.map(|it| Arc::clone(&it.config))
    }

    fn metric(&self, metric: &str) -> String {
        let mut text = String::new();
        encode(&mut text, &self.registry).unwrap();
        let value = text.lines().find_map(|line| line.strip_prefix(metric)?.strip_prefix(' '));
        value.expect("the metric is registered").to_owned()
    }
}

fn name(secret: &str) -> NamespacedName {
    NamespacedName::new("default", secret)
}

fn batch(is_snapshot: bool, changes: impl IntoIterator<Item = RouteChange>) -> RouteBatch {
    let with_key = |change: RouteChange| Some((change.key()?, change));
    let changes = changes.into_iter().filter_map(with_key).collect();
    RouteBatch { is_snapshot, changes, ..RouteBatch::default() }
}

fn received(secret: &str, certificate: &TestCertificate) -> RouteChange {
    RouteChange::Certificate(certificate.entry(&name(secret)))
}

/// Entry of a controller that has not read the Secret yet.
fn without_material(secret: &str) -> RouteChange {
    RouteChange::Certificate(CertificateEntry { name: name(secret), material: None })
}

/// Entry that no handshake can present.
fn broken(secret: &str) -> RouteChange {
    let material = CertificateMaterial {
        chain: vec![b"no certificate".to_vec()],
        key: PrivateKeyBytes::new(b"no key".to_vec()),
    };
    let material = Some(Arc::new(material));
    RouteChange::Certificate(CertificateEntry { name: name(secret), material })
}

fn removed(secret: &str) -> RouteChange {
    RouteChange::Removed(RouteKey::Certificate(name(secret)))
}

fn shared_secrets(secrets: &[&str]) -> RouteChange {
    let certificates = secrets.iter().map(|&it| name(it)).collect();
    let edge = EdgeSettings { certificates, ..EdgeSettings::default() };
    RouteChange::Settings(GlobalSettings { edge, ..GlobalSettings::default() })
}

fn file(path: &str, certificate: &TestCertificate) -> FileCertificate {
    FileCertificate { path: PathBuf::from(path), material: certificate.material() }
}

fn is_same(one: Option<&Arc<ServerConfig>>, other: Option<&Arc<ServerConfig>>) -> bool {
    match (one, other) {
        (Some(one), Some(other)) => Arc::ptr_eq(one, other),
        (one, other) => one.is_none() && other.is_none(),
    }
}

#[test]
fn the_certificate_of_the_mapping_goes_before_all_others() {
    let fixture = Fixture::new();
    let [own, exact] =
        [["elsewhere.example"], ["mapped.example"]].map(|it| fixture.authority.issue(&it));
    fixture.apply([shared_secrets(&["exact"]), received("own", &own), received("exact", &exact)]);
    let exact = fixture.shared("mapped.example");
    assert!(exact.is_some());
    assert!(fixture.own("own").is_some());
    assert!(!is_same(fixture.own("own").as_ref(), exact.as_ref()), "although its name is another");
    let not_read_yet = fixture.own("absent");
    assert!(is_same(not_read_yet.as_ref(), exact.as_ref()), "a shared one stands in");
}

#[test]
fn a_certificate_of_a_mapping_serves_no_foreign_host() {
    let fixture = Fixture::new();
    fixture.apply([received("own", &fixture.authority.issue(&["foreign.example"]))]);
    assert!(fixture.shared("foreign.example").is_none());
    assert!(fixture.unnamed().is_none());
}

#[test]
fn shared_certificates_are_those_of_the_settings_and_then_files() {
    let fixture = Fixture::new();
    let [first, second, in_file] =
        [["a.example"], ["b.example"], ["c.example"]].map(|names| fixture.authority.issue(&names));
    fixture.certificates.set_files(vec![file("/c.crt", &in_file)]);
    let default = || fixture.unnamed();
    let of_file = default();
    assert!(of_file.is_some());
    fixture.apply([
        shared_secrets(&["absent", "second", "first"]),
        received("first", &first),
        received("second", &second),
    ]);
    assert!(is_same(default().as_ref(), fixture.own("second").as_ref()), "the first in force");
    assert!(is_same(fixture.shared("a.example").as_ref(), fixture.own("first").as_ref()));
    assert!(is_same(fixture.shared("c.example").as_ref(), of_file.as_ref()));
    fixture.apply([RouteChange::Removed(RouteKey::Settings)]);
    assert!(is_same(default().as_ref(), of_file.as_ref()));
    fixture.apply([shared_secrets(&["first"])]);
    assert!(is_same(default().as_ref(), fixture.own("first").as_ref()));
    fixture.apply_snapshot([received("first", &first)]);
    assert!(is_same(default().as_ref(), of_file.as_ref()), "a snapshot without settings");
}

#[test]
fn a_broken_certificate_keeps_the_one_before() {
    let fixture = Fixture::new();
    fixture.apply([broken("a")]);
    assert!(fixture.own("a").is_none());
    fixture.apply([received("a", &fixture.authority.issue(&["a.example"]))]);
    let before = fixture.own("a");
    assert!(before.is_some());
    fixture.apply([broken("a")]);
    assert!(is_same(fixture.own("a").as_ref(), before.as_ref()));
    fixture.apply_snapshot([broken("a")]);
    assert!(is_same(fixture.own("a").as_ref(), before.as_ref()));
    fixture.apply([received("a", &fixture.authority.issue(&["a.example"]))]);
    assert!(fixture.own("a").is_some());
    assert!(!is_same(fixture.own("a").as_ref(), before.as_ref()), "a usable one replaces it");
}

#[test]
fn an_entry_without_material_keeps_what_is_held() {
    let fixture = Fixture::new();
    fixture.apply_snapshot([without_material("a")]);
    assert!(fixture.own("a").is_none());
    fixture.apply([received("a", &fixture.authority.issue(&["a.example"]))]);
    let before = fixture.own("a");
    assert!(before.is_some());
    fixture.apply_snapshot([without_material("a")]);
    assert!(is_same(fixture.own("a").as_ref(), before.as_ref()));
    fixture.apply([without_material("a")]);
    assert!(is_same(fixture.own("a").as_ref(), before.as_ref()));
}

#[test]
fn a_snapshot_drops_certificates_that_it_lacks() {
    let fixture = Fixture::new();
    let certificate = fixture.authority.issue(&["a.example"]);
    fixture.apply_snapshot(["a", "b", "c"].map(|it| received(it, &certificate)));
    fixture.apply([removed("c")]);
    let held = |fixture: &Fixture| ["a", "b", "c"].map(|it| fixture.own(it).is_some());
    assert_eq!(held(&fixture), [true, true, false]);
    fixture.apply([]);
    assert_eq!(held(&fixture), [true, true, false], "a later batch names only changes");
    fixture.apply_snapshot([received("b", &certificate)]);
    assert_eq!(held(&fixture), [false, true, false]);
    fixture.apply_snapshot([]);
    assert_eq!(held(&fixture), [false; 3]);
}

#[test]
fn removals_wait_until_the_routes_are_applied() {
    let fixture = Fixture::new();
    let certificate = fixture.authority.issue(&["a.example"]);
    fixture.apply(["a", "b"].map(|it| received(it, &certificate)));
    let removed_by = |is_snapshot| {
        let (batch, held) = (batch(is_snapshot, [removed("a")]), || fixture.own("a").is_some());
        (fixture.certificates.apply_batch(&batch), held())
    };
    assert_eq!(removed_by(false), (vec![name("a")], true));
    assert_eq!(removed_by(true), (vec![name("a"), name("b")], true));
}

#[test]
fn equal_material_makes_no_new_configuration() {
    let fixture = Fixture::new();
    let certificate = fixture.authority.issue(&["a.example"]);
    fixture.apply([received("a", &certificate)]);
    fixture.certificates.set_files(vec![file("/a.crt", &certificate)]);
    let (of_secret, of_file) = (fixture.own("a"), fixture.shared("a.example"));
    assert!(of_secret.is_some() && of_file.is_some());
    fixture.apply([received("a", &certificate)]);
    fixture.apply_snapshot([received("a", &certificate)]);
    fixture.certificates.set_files(vec![file("/a.crt", &certificate)]);
    assert!(is_same(fixture.own("a").as_ref(), of_secret.as_ref()));
    assert!(is_same(fixture.shared("a.example").as_ref(), of_file.as_ref()));
}

#[test]
fn files_that_are_not_given_again_are_dropped() {
    let fixture = Fixture::new();
    let [a, b] = [["a.example"], ["b.example"]].map(|it| fixture.authority.issue(&it));
    fixture.certificates.set_files(vec![file("/a.crt", &a), file("/b.crt", &b)]);
    assert_eq!(fixture.certificates.files(), [file("/a.crt", &a), file("/b.crt", &b)]);
    let b_before = fixture.shared("b.example");
    fixture.certificates.set_files(vec![file("/b.crt", &b)]);
    assert_eq!(fixture.certificates.files(), [file("/b.crt", &b)]);
    assert!(is_same(fixture.shared("a.example").as_ref(), b_before.as_ref()), "the default");
}

/// Certificates of one host: one is valid from 0 to 1,000 s, the other from `start_s` to `end_s`.
fn dated_certificates(fixture: &Fixture, start_s: i64, end_s: i64) -> [TestCertificate; 2] {
    [(0, 1000), (start_s, end_s)]
        .map(|(start_s, end_s)| fixture.authority.issue_valid(&["a.example"], start_s, end_s))
}

/// Settings at each of these times, as numbers in the order of their first use.
fn configs_at<const N: usize>(fixture: &Fixture, times_s: [i64; N]) -> [usize; N] {
    let mut seen: Vec<Arc<ServerConfig>> = Vec::new();
    times_s.map(|now_s| {
        let own = [name("a")];
        let chosen = fixture.certificates.choose_at(&own, None, |_any_key| true, now_s).unwrap();
        let config = Arc::clone(&chosen.config);
        let index = seen.iter().position(|it| Arc::ptr_eq(it, &config));
        index.unwrap_or_else(|| {
            seen.push(config);
            seen.len() - 1
        })
    })
}

#[test]
fn a_certificate_of_the_future_waits_until_it_is_valid() {
    let fixture = Fixture::new();
    let [held, next] = dated_certificates(&fixture, 502, 3000);
    let at_500 = |changes| fixture.certificates.apply_batch_at(&batch(false, changes), 500);
    at_500([received("a", &held)]);
    at_500([received("a", &next)]);
    assert_eq!(configs_at(&fixture, [500, 501, 502, 503]), [0, 0, 1, 1]);
    assert_eq!(configs_at(&fixture, [504, 3001]), [0, 0], "it stays in force when it has ended");
}

#[test]
fn an_expired_certificate_waits_until_the_one_in_force_has_ended() {
    let fixture = Fixture::new();
    let [held, next] = dated_certificates(&fixture, 0, 400);
    let at_500 = |changes| fixture.certificates.apply_batch_at(&batch(false, changes), 500);
    at_500([received("a", &held)]);
    at_500([received("a", &next)]);
    assert_eq!(configs_at(&fixture, [500, 1000, 1001]), [0, 0, 1]);
}

#[test]
fn a_certificate_received_again_ends_the_wait_of_another() {
    let fixture = Fixture::new();
    let [held, next] = dated_certificates(&fixture, 502, 3000);
    let at_500 = |changes| fixture.certificates.apply_batch_at(&batch(false, changes), 500);
    at_500([received("a", &held)]);
    at_500([received("a", &next)]);
    at_500([received("a", &held)]);
    assert_eq!(configs_at(&fixture, [500, 502, 1001]), [0, 0, 0]);
}

#[test]
fn metrics_have_the_number_and_the_earliest_end_of_all_certificates() {
    let fixture = Fixture::new();
    let figures = || {
        let metrics = ["certificates", "certificate_expiry_timestamp_seconds"];
        metrics.map(|it| fixture.metric(&format!("rouse_activator_{it}")))
    };
    assert_eq!(figures(), ["0", "0"]);
    let [a, b] = [4_000_000_000, 3_000_000_000]
        .map(|end_s| fixture.authority.issue_valid(&["a.example"], 0, end_s));
    fixture.apply([received("a", &a), broken("c"), without_material("d")]);
    assert_eq!(figures(), ["1", "4000000000"]);
    fixture.certificates.set_files(vec![file("/b.crt", &b)]);
    assert_eq!(figures(), ["2", "3000000000"]);
    fixture.certificates.set_files(Vec::new());
    fixture.apply_snapshot([]);
    assert_eq!(figures(), ["0", "0"]);
}

#[test]
fn debug_output_has_names_only() {
    let fixture = Fixture::new();
    let certificate = fixture.authority.issue(&["a.example"]);
    fixture.apply([received("a", &certificate)]);
    fixture.certificates.set_files(vec![file("/b.crt", &certificate)]);
    let text = format!("{:?}", fixture.certificates);
    assert_eq!(
        text,
        r#"HostCertificates { secrets: [NamespacedName { namespace: "default", name: "a" }], files: ["/b.crt"], .. }"#
    );
}

#[test]
fn other_versions_and_ciphers_make_new_settings_of_each_certificate() {
    let fixture = Fixture::new();
    let [own, shared, of_file] = [["own.example"], ["shared.example"], ["file.example"]]
        .map(|it| fixture.authority.issue(&it));
    fixture.apply([
        shared_secrets(&["shared"]),
        received("own", &own),
        received("shared", &shared),
    ]);
    fixture.certificates.set_files(vec![file("/a.crt", &of_file)]);
    let configs = || {
        let shared = ["shared.example", "file.example"].map(|host| fixture.shared(host));
        [fixture.own("own")].into_iter().chain(shared).map(Option::unwrap).collect::<Vec<_>>()
    };
    let before = configs();
    fixture.certificates.set_tls(&EdgeSettings::default());
    assert!(before.iter().zip(configs()).all(|(old, new)| Arc::ptr_eq(old, &new)), "no change");
    let ciphers = vec![TlsCipher::Aes128GcmSha256];
    let tls = TlsSettings { min_version: TlsMinVersion::Tls13, ciphers };
    fixture.certificates.set_tls(&EdgeSettings { tls, ..EdgeSettings::default() });
    for (old, new) in before.iter().zip(configs()) {
        assert!(!Arc::ptr_eq(old, &new), "old tickets are of no use");
        let suites = |it: &ServerConfig| it.crypto_provider().cipher_suites.len();
        assert_eq!((suites(old), suites(&new)), (TlsCipher::ALL.len(), 1));
    }
    // A certificate that comes later follows the same settings.
    fixture.apply([received("own", &fixture.authority.issue(&["own.example"]))]);
    let own = fixture.own("own").unwrap();
    assert_eq!(own.crypto_provider().cipher_suites.len(), 1);
}

#[test]
fn strict_sni_is_for_handshakes_and_pages_and_ends_with_its_setting() {
    let fixture = Fixture::new();
    let issued = fixture.authority.issue(&["a.example"]);
    fixture.certificates.set_files(vec![file("/a.crt", &issued)]);
    let config = fixture.shared("a.example");
    for is_sni_strict in [true, false] {
        fixture.certificates.set_tls(&EdgeSettings { is_sni_strict, ..EdgeSettings::default() });
        assert!(is_same(fixture.shared("a.example").as_ref(), config.as_ref()), "tickets stay");
        assert_eq!(fixture.shared("b.example").is_none(), is_sni_strict);
        assert_eq!(fixture.unnamed().is_none(), is_sni_strict);
        let shown = fixture.certificates.snapshot();
        let is_shown = |host| shown.choice_facts(&[], host).is_some();
        assert_eq!((is_shown("a.example"), is_shown("b.example")), (true, !is_sni_strict));
    }
}

/// A controller that starts signs them again, and there may be ten thousand.
#[test]
fn certificates_of_names_inside_the_cluster_are_logged_for_debugging_only() {
    let secret = name("web");
    let (local, port) =
        (secret.with_port(LOCAL_TLS_PORT), secret.with_port(NonZeroU16::new(5432).unwrap()));
    for (source, level) in [
        (CertificateSource::Secret(&local), Level::DEBUG),
        (CertificateSource::Secret(&port), Level::INFO),
        (CertificateSource::Secret(&secret), Level::INFO),
        (CertificateSource::File(Path::new("/tls/443")), Level::INFO),
    ] {
        assert_eq!(source.log_level(), level, "{source}");
    }
}
