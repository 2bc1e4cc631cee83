//! Tests against a registry on loopback, which can fail in ways that a real one does not on request. A real one is
//! queried in `tests/local/digests.rs`.

use std::sync::{
    Arc,
    atomic::{AtomicUsize, Ordering},
    mpsc,
};

use axum::{
    Router,
    extract::{Request, State},
    http::{HeaderMap, StatusCode, header},
    response::{IntoResponse, Response},
};
use tokio::net::TcpListener;

use super::*;
use crate::{credentials::PullSecret, image_reference::ImageReference};

const DIGEST: &str = "sha256:aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa";
const LIMIT: Duration = Duration::from_secs(20);

#[derive(Default)]
struct FakeRegistry {
    /// Value of `Authorization` that it requires, if any.
    required_authorization: Option<&'static str>,
    /// Status of every response, if the registry refuses all requests.
    forced_status: Option<StatusCode>,
    is_slow: bool,
    request_count: AtomicUsize,
    /// Gets a message for each request.
    request_tx: Option<mpsc::Sender<()>>,
}

async fn respond(State(registry): State<Arc<FakeRegistry>>, request: Request) -> Response {
    registry.request_count.fetch_add(1, Ordering::Relaxed);
    // The receiver is gone once the test has its first message.
    registry.request_tx.iter().for_each(|it| it.send(()).unwrap_or_default());
    if registry.is_slow {
        std::future::pending::<()>().await;
    }
    let sent = request.headers().get(header::AUTHORIZATION);
    let sent = sent.and_then(|it| it.to_str().ok());
    if registry.required_authorization.is_some() && registry.required_authorization != sent {
        let realm = [(header::WWW_AUTHENTICATE, "Basic realm=\"test\"")];
        return (StatusCode::UNAUTHORIZED, realm).into_response();
    }
    if let Some(status) = registry.forced_status {
        return status.into_response();
    }
    if request.uri().path() == "/v2/" {
        return StatusCode::OK.into_response();
    }
    if request.uri().path() != "/v2/team/app/manifests/v1" {
        return StatusCode::NOT_FOUND.into_response();
    }
    // An index is sent only to clients that accept one: otherwise the digest would be one platform's.
    let accepts = |headers: &HeaderMap, kind: &str| {
        let all = headers.get_all(header::ACCEPT).iter().filter_map(|it| it.to_str().ok());
        all.into_iter().any(|it| it.contains(kind))
    };
    let index = "application/vnd.oci.image.index.v1+json";
    if !accepts(request.headers(), index) {
        return StatusCode::NOT_ACCEPTABLE.into_response();
    }
    ([("docker-content-digest", DIGEST), ("content-type", index)]).into_response()
}

/// Serves until the test ends; returns the tag of its image, and the registry with its counter.
async fn start_registry(registry: FakeRegistry) -> (ImageTag, Arc<FakeRegistry>) {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let port = listener.local_addr().unwrap().port();
    let registry = Arc::new(registry);
    let router = Router::new().fallback(respond).with_state(Arc::clone(&registry));
    tokio::spawn(async move { axum::serve(listener, router).await });
    (parse_tag(&format!("127.0.0.1:{port}/team/app:v1")), registry)
}

fn parse_tag(image: &str) -> ImageTag {
    match ImageReference::parse(image) {
        Ok(ImageReference::Tag(tag)) => tag,
        other => panic!("{image}: {other:?}"),
    }
}

fn keyring(tag: &ImageTag, users: &[&str]) -> Keyring {
    let secret = |user: &&str| {
        let json = serde_json::json!({ "auths": { tag.registry():
            { "username": user, "password": "secret" } } });
        PullSecret {
            name: (*user).to_owned(),
            kind: "kubernetes.io/dockerconfigjson".into(),
            data: [(".dockerconfigjson".to_owned(), json.to_string().into_bytes())].into(),
        }
    };
    Keyring::from_pull_secrets(&users.iter().map(secret).collect::<Vec<_>>()).0
}

async fn query(tag: &ImageTag, keyring: &Keyring) -> Result<String, String> {
    RegistryClient::new(&[]).query_digest(tag, keyring, LIMIT).await.map_err(|it| it.to_line())
}

#[tokio::test]
async fn a_tag_leads_to_the_digest_of_its_index() {
    let (tag, _) = start_registry(FakeRegistry::default()).await;
    let want = format!("{}/team/app@{DIGEST}", tag.registry());
    assert_eq!(query(&tag, &Keyring::default()).await, Ok(want));
}

#[tokio::test]
async fn each_login_that_fits_is_tried() {
    // The base64 of `good:secret`.
    let login = Some("Basic Z29vZDpzZWNyZXQ=");
    let (tag, _) =
        start_registry(FakeRegistry { required_authorization: login, ..FakeRegistry::default() })
            .await;
    let said = query(&tag, &keyring(&tag, &["bad", "good"])).await;
    assert_eq!(said, Ok(format!("{}/team/app@{DIGEST}", tag.registry())));
    let said = query(&tag, &keyring(&tag, &["bad"])).await.unwrap_err();
    assert!(said.contains(" refuses the credentials: check the pull secrets"), "{said}");
    let said = query(&tag, &Keyring::default()).await.unwrap_err();
    assert!(said.contains(" wants credentials: name a pull secret"), "{said}");
}

#[tokio::test]
async fn a_missing_tag_and_a_broken_registry_have_different_errors() {
    let (tag, _) = start_registry(FakeRegistry::default()).await;
    let missing = parse_tag(&format!("{}/team/none:v1", tag.registry()));
    let said = query(&missing, &Keyring::default()).await.unwrap_err();
    assert!(said.contains(" does not have it: check its name and tag"), "{said}");
    let status = Some(StatusCode::INTERNAL_SERVER_ERROR);
    let (tag, _) =
        start_registry(FakeRegistry { forced_status: status, ..FakeRegistry::default() }).await;
    let said = query(&tag, &Keyring::default()).await.unwrap_err();
    assert!(said.contains(" sent no response that can be used") && said.contains("500"), "{said}");
    assert!(!said.contains('\n'), "{said}");
}

#[tokio::test(start_paused = true)]
async fn a_slow_registry_times_out() {
    let (arrives, arrived) = mpsc::channel();
    let slow = FakeRegistry { is_slow: true, request_tx: Some(arrives), ..FakeRegistry::default() };
    let (tag, registry) = start_registry(slow).await;
    // Paused time stands still while a blocking task runs: here until the registry has a request, at most a minute.
    tokio::task::spawn_blocking(move || arrived.recv_timeout(Duration::from_mins(1)));
    let limit = Duration::from_millis(1500);
    let said =
        RegistryClient::new(&[]).query_digest(&tag, &Keyring::default(), limit).await.unwrap_err();
    let want = format!("registry {} sent no response within 1.5s", tag.registry());
    assert_eq!(said.to_line(), want);
    assert!(registry.request_count.load(Ordering::Relaxed) > 0);
}

#[tokio::test]
async fn an_unreachable_registry_is_reported() {
    let free = TcpListener::bind("127.0.0.1:0").await.unwrap().local_addr().unwrap().port();
    let said = query(&parse_tag(&format!("127.0.0.1:{free}/a:v1")), &Keyring::default()).await;
    let said = said.unwrap_err();
    assert!(said.contains(" sent no response that can be used: "), "{said}");
}

#[tokio::test]
async fn certificates_are_parsed_from_a_text_that_contains_more() {
    let pem = "-----BEGIN CERTIFICATE-----\nAA==\n-----END CERTIFICATE-----\n";
    assert_eq!(parse_certificates(&format!("# who\n{pem}{pem}rest")).len(), 2);
    assert_eq!(parse_certificates("nothing").len(), 0);
}
