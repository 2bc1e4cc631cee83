use std::time::SystemTime;

use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};

use super::{
    certs::WebhookCertBundle,
    register::{WebhookAddress, self_call},
    *,
};
use crate::config_maps::Configs;

const DAY: Duration = Duration::from_secs(24 * 3600);

fn bundle(before: Option<&WebhookCertBundle>, now: SystemTime) -> WebhookCertBundle {
    WebhookCertBundle::make(&WebhookAddress::new("knative-serving", 0).names(), before, now)
        .expect("made")
}

#[test]
fn a_certificate_is_renewed_in_time_under_the_same_authority() {
    let now = SystemTime::now();
    let first = bundle(None, now);
    assert!(!first.is_due(now + DAY * 19) && first.is_due(now + DAY * 20));
    let second = bundle(Some(&first), now + DAY * 20);
    assert_eq!(second.authority, first.authority);
    assert_ne!(second, first);
    let last = bundle(Some(&second), now + DAY * 3640);
    assert_ne!(last.authority, first.authority, "an authority ends too");
}

#[test]
fn a_certificate_made_while_the_clock_was_ahead_is_made_anew() {
    let now = SystemTime::now();
    let ahead = bundle(None, now + DAY);
    assert!(ahead.is_due(now), "the API server would refuse it for a day");
    let made = bundle(Some(&ahead), now);
    assert_ne!(made.authority, ahead.authority, "it looks at both");
    assert!(!made.is_due(now));
    let of_old = bundle(Some(&made), now + DAY * 2);
    assert_eq!(of_old.authority, made.authority);
    assert!(of_old.is_due(now), "the authority holds, what it signed does not");
    assert_eq!(bundle(Some(&of_old), now).authority, made.authority);
    assert!(!made.is_due(now - Duration::from_secs(3_500)), "clocks of machines differ");
}

#[test]
fn what_a_secret_holds_is_read_back_or_made_anew() {
    let bundle = bundle(None, SystemTime::now());
    let mut data = bundle.data();
    assert_eq!(WebhookCertBundle::read(&data), Some(bundle));
    let other = self::bundle(None, SystemTime::now()).data();
    data.insert("server-key.pem".into(), other["server-key.pem"].clone());
    assert_eq!(WebhookCertBundle::read(&data), None, "a key of another certificate");
    data.remove("ca-cert.pem");
    assert_eq!(WebhookCertBundle::read(&data), None);
    assert_eq!(WebhookCertBundle::read(&Default::default()), None);
}

#[test]
fn no_key_is_printed() {
    let text = format!("{:?}", bundle(None, SystemTime::now()));
    assert!(!text.contains("PRIVATE"), "{text}");
}

struct WebhookServerFixture {
    place: WebhookAddress,
    certificates: Arc<WebhookCertResolver>,
    stop: CancellationToken,
    served: tokio::task::JoinHandle<Result<(), WebhookError>>,
}

async fn bed() -> WebhookServerFixture {
    let listener = listen(([127, 0, 0, 1], 0).into()).await.expect("a port");
    let port = listener.local_addr().expect("bound").port();
    let (certificates, stop) = (Arc::new(WebhookCertResolver::default()), CancellationToken::new());
    let settings: WebhookSettingsSource = Arc::new(|| Arc::new(AdmissionSettings::default()));
    let served = tokio::spawn(serve(
        listener,
        Arc::clone(&certificates),
        AdmissionContext::of(settings),
        stop.clone(),
    ));
    WebhookServerFixture {
        place: WebhookAddress::new("knative-serving", port),
        certificates,
        stop,
        served,
    }
}

#[tokio::test]
async fn questions_are_answered_over_tls_and_another_certificate_takes_over() {
    let bed = bed().await;
    let first = bundle(None, SystemTime::now());
    assert!(self_call(&bed.place, &first).await.is_err(), "no certificate yet");
    assert!(bed.certificates.set(&first).expect("usable"));
    assert!(!bed.certificates.set(&first).expect("usable"), "the same again");
    self_call(&bed.place, &first).await.expect("answered");
    let other = bundle(None, SystemTime::now());
    let error = self_call(&bed.place, &other).await.expect_err("another authority");
    assert!(error.to_string().contains("does not answer"), "{error}");
    bed.certificates.set(&other).expect("usable");
    self_call(&bed.place, &other).await.expect("answered");
    bed.stop.cancel();
    bed.served.await.expect("no panic").expect("served");
}

#[tokio::test]
async fn rubbish_ends_its_own_connection_only() {
    let bed = bed().await;
    let bundle = bundle(None, SystemTime::now());
    bed.certificates.set(&bundle).expect("usable");
    let mut rubbish = TcpStream::connect(("127.0.0.1", bed.place.port)).await.expect("open");
    rubbish.write_all(b"GET / HTTP/1.1\r\n\r\n").await.expect("sent");
    let mut answer = Vec::new();
    // The server sends an alert or a reset; neither is a response.
    let _ = rubbish.read_to_end(&mut answer).await;
    assert!(!answer.starts_with(b"HTTP"), "{answer:?}");
    self_call(&bed.place, &bundle).await.expect("answered");
}

#[test]
fn pods_are_asked_about_where_bind_pods_says_so() {
    let hooks = |data: &[(&str, &str)]| {
        let mut configs = Configs::default();
        let data = data.iter().map(|&(key, text)| (key.into(), text.into())).collect();
        configs.update("config-deployment", Some(&data));
        let binds = AdmissionSettings::of(&configs, "cluster.local").bind_pods;
        let (mutating, _) =
            register::configurations(&WebhookAddress::new("rouse", 8443), "", binds);
        mutating["webhooks"].as_array().map_or(0, Vec::len)
    };
    assert_eq!((hooks(&[]), hooks(&[("bind-pods", "true")])), (1, 2));
}
