use std::{
    net::{IpAddr, Ipv4Addr, Ipv6Addr},
    sync::atomic::{AtomicU32, Ordering},
    time::SystemTime,
};

use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};

use super::{
    certificates::WebhookCertBundle,
    configurations::{WebhookAddress, webhook_configurations},
    registration::check_self_call,
    *,
};
use crate::model::config_maps::Configs;

const DAY: Duration = Duration::from_secs(24 * 3600);

fn make_bundle(previous: Option<&WebhookCertBundle>, now: SystemTime) -> WebhookCertBundle {
    WebhookCertBundle::create(
        &WebhookAddress::new("knative-serving", 0).host_names(),
        previous,
        now,
    )
    .expect("made")
}

#[test]
fn a_certificate_is_renewed_in_time_under_the_same_authority() {
    let now = SystemTime::now();
    let first = make_bundle(None, now);
    assert!(!first.is_due(now + DAY * 19) && first.is_due(now + DAY * 20));
    let second = make_bundle(Some(&first), now + DAY * 20);
    assert_eq!(second.authority, first.authority);
    assert_ne!(second, first);
    let last = make_bundle(Some(&second), now + DAY * 3640);
    assert_ne!(last.authority, first.authority, "an authority ends too");
}

#[test]
fn a_certificate_made_while_the_clock_was_ahead_is_replaced() {
    let now = SystemTime::now();
    let ahead = make_bundle(None, now + DAY);
    assert!(ahead.is_due(now), "the API server would refuse it for a day");
    let renewed = make_bundle(Some(&ahead), now);
    assert_ne!(renewed.authority, ahead.authority, "the authority was made too early as well");
    assert!(!renewed.is_due(now));
    let later = make_bundle(Some(&renewed), now + DAY * 2);
    assert_eq!(later.authority, renewed.authority);
    assert!(later.is_due(now), "the authority holds, what it signed does not");
    assert_eq!(make_bundle(Some(&later), now).authority, renewed.authority);
    assert!(!renewed.is_due(now - Duration::from_secs(3_500)), "clocks of machines differ");
}

#[test]
fn the_data_of_a_secret_are_read_back_and_refused_if_a_part_does_not_fit() {
    let bundle = make_bundle(None, SystemTime::now());
    let mut data = bundle.to_secret_data();
    assert_eq!(WebhookCertBundle::from_secret_data(&data), Some(bundle));
    let other = make_bundle(None, SystemTime::now()).to_secret_data();
    data.insert("server-key.pem".into(), other["server-key.pem"].clone());
    assert_eq!(WebhookCertBundle::from_secret_data(&data), None, "a key of another certificate");
    data.remove("ca-cert.pem");
    assert_eq!(WebhookCertBundle::from_secret_data(&data), None);
    assert_eq!(WebhookCertBundle::from_secret_data(&Default::default()), None);
}

#[test]
fn no_key_is_printed() {
    let text = format!("{:?}", make_bundle(None, SystemTime::now()));
    assert!(!text.contains("PRIVATE"), "{text}");
}

struct WebhookServerFixture {
    address: WebhookAddress,
    certificates: Arc<WebhookCertResolver>,
    stop: CancellationToken,
    server_task: tokio::task::JoinHandle<Result<(), WebhookError>>,
}

async fn start_server() -> WebhookServerFixture {
    start_server_at(Ipv4Addr::LOCALHOST.into()).await
}

async fn start_server_at(ip: IpAddr) -> WebhookServerFixture {
    let listener = listen((ip, 0).into()).await.expect("a port");
    let port = listener.local_addr().expect("bound").port();
    let (certificates, stop) = (Arc::new(WebhookCertResolver::default()), CancellationToken::new());
    let settings: WebhookSettingsSource = Arc::new(|| Arc::new(AdmissionSettings::default()));
    let served = tokio::spawn(serve(
        listener,
        Arc::clone(&certificates),
        AdmissionContext::without_placement(settings),
        stop.clone(),
    ));
    WebhookServerFixture {
        address: WebhookAddress::new("knative-serving", port),
        certificates,
        stop,
        server_task: served,
    }
}

#[tokio::test]
async fn reviews_are_answered_over_tls_and_the_certificate_can_be_replaced() {
    let server = start_server().await;
    let first = make_bundle(None, SystemTime::now());
    assert!(check_self_call(&server.address, &first).await.is_err(), "no certificate yet");
    assert!(server.certificates.set(&first).expect("usable"));
    assert!(!server.certificates.set(&first).expect("usable"), "the same again");
    check_self_call(&server.address, &first).await.expect("answered");
    let other = make_bundle(None, SystemTime::now());
    let error = check_self_call(&server.address, &other).await.expect_err("another authority");
    assert!(error.to_string().contains("does not respond"), "{error}");
    server.certificates.set(&other).expect("usable");
    check_self_call(&server.address, &other).await.expect("answered");
    server.stop.cancel();
    server.server_task.await.expect("no panic").expect("served");
}

/// The webhook may listen at an IPv6 address alone, where pods have no other.
#[tokio::test]
async fn a_replica_calls_itself_by_the_family_that_it_listens_on() {
    let server = start_server_at(Ipv6Addr::LOCALHOST.into()).await;
    let bundle = make_bundle(None, SystemTime::now());
    server.certificates.set(&bundle).expect("usable");
    check_self_call(&server.address, &bundle).await.expect("answered");
    server.stop.cancel();
    server.server_task.await.expect("no panic").expect("served");
}

#[tokio::test]
async fn a_connection_without_tls_ends_alone() {
    let server = start_server().await;
    let bundle = make_bundle(None, SystemTime::now());
    server.certificates.set(&bundle).expect("usable");
    let mut plain = TcpStream::connect(("127.0.0.1", server.address.port)).await.expect("open");
    plain.write_all(b"GET / HTTP/1.1\r\n\r\n").await.expect("sent");
    let mut response = Vec::new();
    // The server sends an alert or a reset; neither is a response.
    let _ = plain.read_to_end(&mut response).await;
    assert!(!response.starts_with(b"HTTP"), "{response:?}");
    check_self_call(&server.address, &bundle).await.expect("answered");
}

#[test]
fn the_binding_webhook_is_registered_if_bind_pods_is_set() {
    let hooks = |data: &[(&str, &str)]| {
        let mut configs = Configs::default();
        let data = data.iter().map(|&(key, text)| (key.into(), text.into())).collect();
        configs.update("config-deployment", Some(&data));
        let one_zone = AdmissionSettings::from_configs(&configs, "cluster.local");
        let zones = AdmissionSettings { prefers_wake_zone: true, ..one_zone.clone() };
        [one_zone, zones].map(|settings| {
            let address = WebhookAddress::new("rouse", 8443);
            let (mutating, _) = webhook_configurations(&address, "", settings.places_pods());
            mutating["webhooks"].as_array().map_or(0, Vec::len)
        })
    };
    assert_eq!((hooks(&[]), hooks(&[("bind-pods", "true")])), ([1, 2], [2, 2]));
}

/// At `/binding`, a replica of an earlier release would bind pods although the setting forbids it.
#[test]
fn no_replica_of_an_earlier_release_binds_pods_for_a_preferred_zone() {
    let (mutating, _) = webhook_configurations(&WebhookAddress::new("rouse", 8443), "", true);
    let hook = &mutating["webhooks"][1];
    assert_eq!(hook["clientConfig"]["service"]["path"], "/pod-placement");
    assert_eq!(hook["failurePolicy"], "Ignore", "such a replica does not serve the path");
}

/// Counts the checks of a review for the decision that ordered its pod, of which this number do not find it.
async fn count_order_checks(misses: u32) -> u32 {
    let checks = Arc::new(AtomicU32::new(0));
    let counted = Arc::clone(&checks);
    let is_known: PodOrderCheck =
        Arc::new(move |_: &Value| counted.fetch_add(1, Ordering::Relaxed) >= misses);
    wait_for_order(&is_known, &Value::Null).await;
    checks.load(Ordering::Relaxed)
}

#[tokio::test(start_paused = true)]
async fn a_review_waits_until_the_decision_is_known_and_not_forever() {
    assert_eq!(count_order_checks(0).await, 1);
    assert_eq!(count_order_checks(3).await, 4);
    let checks = count_order_checks(u32::MAX).await;
    assert!((4..=10).contains(&checks), "{checks} checks: each takes the lock of the state");
}

#[test]
fn a_certificate_is_valid_for_the_host_of_the_url() {
    let last_name = |url: &str| {
        let url = Some(url.to_owned());
        WebhookAddress { url, ..WebhookAddress::new("knative-serving", 0) }.host_names().pop()
    };
    let table = [
        ("https://[::1]:8443", "::1"),
        ("https://[fd00::1]", "fd00::1"),
        ("https://127.0.0.1:8443", "127.0.0.1"),
        ("https://hooks.example.com/rouse", "hooks.example.com"),
    ];
    for (url, expected) in table {
        assert_eq!(last_name(url).as_deref(), Some(expected));
    }
}
