//! Shell: client of the API servers, which asks the next one when one fails.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::SocketAddr,
    sync::{Arc, Mutex},
};

use common::link::error_chain;
use http::{Request, Response};
use http_body_util::{BodyExt, combinators::UnsyncBoxBody};
use hyper::body::Bytes;
use kube::{Client, Config, client::Body};
use tracing::{info, warn};

use crate::{
    api_servers::{ApiServer, ApiServerRotation},
    lock::lock,
};

/// Name in the certificate of each API server. Of the addresses of its host, the certificate may lack some.
const API_SERVER_NAME: &str = "kubernetes.default.svc";

/// Body of a response, whose failure counts as one of the server.
type WatchedBody = UnsyncBoxBody<Bytes, kube::Error>;

/// Client of several API servers. Clones share the servers and their states.
#[derive(Clone)]
pub(crate) struct ApiServerClient {
    /// Credentials and timeouts; the URL is that of the configured server.
    config: Arc<Config>,
    rotation: Arc<Mutex<ApiServerRotation>>,
    /// Client of each server that was asked.
    clients: Arc<Mutex<BTreeMap<ApiServer, Client>>>,
}

impl ApiServerClient {
    /// Makes a client with the credentials of `config`. It connects to no server yet. Fails if the credentials cannot be
    /// used.
    pub(crate) fn new(
        mut config: Config,
        rotation: ApiServerRotation,
    ) -> Result<Self, kube::Error> {
        // The client would ask an overloaded server again and again, and never another one. Callers make the pauses.
        config.default_retry = false;
        let first = rotation.candidates().into_iter().next();
        let client = Self {
            config: config.into(),
            rotation: Arc::new(rotation.into()),
            clients: Arc::default(),
        };
        first.map(|server| client.client_of(&server)).transpose()?;
        Ok(client)
    }

    /// Returns a client for any request. It passes each to the server in use, and a read to the next one on failure.
    pub(crate) fn client(&self) -> Client {
        let servers = self.clone();
        let service = tower::service_fn(move |request| servers.clone().send(request));
        Client::new(service, self.config.default_namespace.clone())
    }

    /// Replaces the learnt servers by a complete observation.
    pub(crate) fn set_learnt(&self, addresses: &BTreeSet<SocketAddr>) {
        let mut rotation = lock(&self.rotation);
        if rotation.set_learnt(addresses) {
            let known: BTreeSet<ApiServer> = rotation.candidates().into_iter().collect();
            lock(&self.clients).retain(|server, _| known.contains(server));
            info!(?addresses, "API servers learnt");
        }
    }

    /// Sends a request to each server in turn until one answers. Returns the result of the last one.
    async fn send(self, request: Request<Body>) -> Result<Response<WatchedBody>, kube::Error> {
        let (parts, body) = request.into_parts();
        let candidates = lock(&self.rotation).candidates();
        let (mut next_body, mut last) = (Some(body), None);
        for server in candidates {
            let Some(body) = next_body.take() else { break };
            // Only reads are repeated: a server may have carried out a write although its answer is lost.
            next_body = body.try_clone().filter(|_| parts.method.is_safe());
            let request = Request::from_parts(parts.clone(), body);
            let result = match self.client_of(&server) {
                Ok(client) => client.send(request).await,
                Err(error) => Err(error),
            };
            let failure = match &result {
                // A server that has lost its etcd still responds, and another one may do better.
                Ok(response) if response.status().is_server_error() => {
                    Some(format!("status {}", response.status()))
                }
                Ok(_) => None,
                Err(error) => Some(error_chain(error)),
            };
            match failure {
                None => {
                    self.record_answer(&server);
                    return result.map(|response| self.watch_body(server, response));
                }
                Some(reason) => self.record_failure(&server, &reason),
            }
            last = Some(result.map(|response| response.map(BodyExt::boxed_unsync)));
        }
        last.expect("a rotation has a server, and the first request has a body")
    }

    /// Records a failure of the server if the body of a response fails, as when the server ends within a watch. The watch
    /// then begins again at the next server.
    fn watch_body(&self, server: ApiServer, response: Response<Body>) -> Response<WatchedBody> {
        let servers = self.clone();
        let record = move |error: kube::Error| {
            servers.record_failure(&server, &error_chain(&error));
            error
        };
        response.map(|body| body.map_err(record).boxed_unsync())
    }

    fn record_failure(&self, server: &ApiServer, reason: &str) {
        // One warning per outage: each watch tries all servers again and again.
        if lock(&self.rotation).record_failure(server) {
            warn!(%server, reason, "API server failed");
        }
    }

    fn record_answer(&self, server: &ApiServer) {
        if lock(&self.rotation).record_answer(server) {
            info!(%server, "API server answers again");
        }
    }

    /// Returns the client of one server, with its pool of connections.
    fn client_of(&self, server: &ApiServer) -> Result<Client, kube::Error> {
        let mut clients = lock(&self.clients);
        if let Some(client) = clients.get(server) {
            return Ok(client.clone());
        }
        let client = Client::try_from(self.config_of(server))?;
        clients.insert(server.clone(), client.clone());
        Ok(client)
    }

    fn config_of(&self, server: &ApiServer) -> Config {
        let mut config = Config::clone(&self.config);
        let (url, is_address) = match server {
            ApiServer::Configured => return config,
            ApiServer::Given(url) => (url.to_string(), url.address().is_some()),
            ApiServer::Learnt(address) => {
                // The endpoint's port has the name `https`. As with given servers, only a loopback address may do
                // without: the configured server may be a proxy on this machine, and the token is for TLS only.
                let is_plain =
                    address.ip().is_loopback() && config.cluster_url.scheme_str() == Some("http");
                let scheme = if is_plain { "http" } else { "https" };
                (format!("{scheme}://{address}"), true)
            }
        };
        config.cluster_url = url.parse().expect("a scheme, a host and a port are a URL");
        if is_address && config.tls_server_name.is_none() {
            config.tls_server_name = Some(API_SERVER_NAME.to_owned());
        }
        config
    }
}

#[cfg(test)]
mod tests {
    use std::{
        io,
        sync::atomic::{AtomicUsize, Ordering},
    };

    use axum::{Router, body::Body as ServedBody, http::StatusCode, response::IntoResponse as _};
    use futures::{StreamExt as _, stream};
    use tokio::net::TcpListener;

    use super::*;
    use crate::api_servers::ApiServerUrl;

    /// API server that gives one answer; `None`: a body that breaks off.
    struct AnsweringServer {
        address: SocketAddr,
        requests: Arc<AtomicUsize>,
    }

    impl AnsweringServer {
        async fn start(status: Option<u16>) -> Self {
            let listener = TcpListener::bind("127.0.0.1:0").await.expect("a free port");
            let address = listener.local_addr().expect("a socket");
            let requests = Arc::new(AtomicUsize::new(0));
            let counted = Arc::clone(&requests);
            let answer = move || {
                counted.fetch_add(1, Ordering::Relaxed);
                async move {
                    match status.map(StatusCode::from_u16) {
                        Some(status) => (status.expect("a status"), "answer").into_response(),
                        None => {
                            let end = async {
                                // The first chunk is sent meanwhile.
                                tokio::task::yield_now().await;
                                Err(io::Error::other("the server ends"))
                            };
                            let chunks = stream::iter([Ok("answ")]).chain(stream::once(end));
                            ServedBody::from_stream(chunks).into_response()
                        }
                    }
                }
            };
            let router = Router::new().fallback(answer);
            tokio::spawn(axum::serve(listener, router).into_future());
            Self { address, requests }
        }

        fn count(&self) -> usize {
            self.requests.load(Ordering::Relaxed)
        }
    }

    /// Returns an address at which no server listens.
    async fn closed_address() -> SocketAddr {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a free port");
        listener.local_addr().expect("a socket")
    }

    /// Returns a client of these servers, the first one in use.
    fn client(addresses: &[SocketAddr]) -> ApiServerClient {
        let url = |at: &SocketAddr| format!("http://{at}").parse().expect("a URL");
        let urls: Vec<ApiServerUrl> = addresses.iter().map(url).collect();
        let first = urls.iter().filter(|it| **it < urls[0]).count();
        let config = Config::new("http://127.0.0.1:1".parse().expect("a URL"));
        ApiServerClient::new(config, ApiServerRotation::new(&urls, first)).expect("credentials")
    }

    async fn get(client: &ApiServerClient) -> Result<String, kube::Error> {
        let request = Request::get("/version").body(Vec::new()).expect("a request");
        client.client().request_text(request).await
    }

    #[tokio::test]
    async fn a_read_goes_on_until_a_server_answers() {
        let (failing, good) =
            (AnsweringServer::start(Some(503)).await, AnsweringServer::start(Some(200)).await);
        for failing in [closed_address().await, failing.address] {
            let client = client(&[failing, good.address]);
            for _ in 0..3 {
                assert_eq!(get(&client).await.expect("an answer"), "answer");
            }
        }
        assert_eq!((failing.count(), good.count()), (1, 6), "the good one stays in use");
    }

    #[tokio::test]
    async fn a_refusal_is_an_answer() {
        for status in [401, 403, 404, 410, 422, 429] {
            let server = AnsweringServer::start(Some(status)).await;
            let other = AnsweringServer::start(Some(200)).await;
            let client = client(&[server.address, other.address]);
            for _ in 0..2 {
                get(&client).await.expect_err("an error of the API");
            }
            assert_eq!((server.count(), other.count()), (2, 0), "{status}");
        }
    }

    #[tokio::test]
    async fn the_last_error_shows_if_all_servers_fail() {
        let (one, two) =
            (AnsweringServer::start(Some(500)).await, AnsweringServer::start(Some(503)).await);
        let client = client(&[one.address, two.address]);
        let error = get(&client).await.expect_err("no server answers");
        assert!(matches!(&error, kube::Error::Api(status) if status.code == 503), "{error:?}");
        get(&client).await.expect_err("no server answers");
        assert_eq!((one.count(), two.count()), (2, 2), "each request asks each server once");
    }

    #[tokio::test]
    async fn a_write_is_sent_once() {
        let (failing, good) =
            (AnsweringServer::start(Some(503)).await, AnsweringServer::start(Some(201)).await);
        let client = client(&[failing.address, good.address]);
        let post = async || {
            let request = Request::post("/events").body(b"{}".to_vec()).expect("a request");
            client.client().request_text(request).await
        };
        post().await.expect_err("the server in use fails");
        assert_eq!((failing.count(), good.count()), (1, 0));
        post().await.expect("the next one is in use");
        assert_eq!((failing.count(), good.count()), (1, 1));
    }

    #[tokio::test]
    async fn a_body_that_breaks_off_moves_later_requests_to_the_next_server() {
        let (broken, good) =
            (AnsweringServer::start(None).await, AnsweringServer::start(Some(200)).await);
        let client = client(&[broken.address, good.address]);
        get(&client).await.expect_err("half a body is none");
        assert_eq!(get(&client).await.expect("an answer"), "answer");
        assert_eq!((broken.count(), good.count()), (1, 1));
    }

    #[tokio::test]
    async fn learnt_servers_are_asked_after_the_configured_one() {
        let learnt = AnsweringServer::start(Some(200)).await;
        // No server is given, and the configured one is away.
        let config = format!("http://{}", closed_address().await).parse().map(Config::new);
        let rotation = ApiServerRotation::new(&[], 0);
        let client = ApiServerClient::new(config.expect("a URL"), rotation).expect("credentials");
        get(&client).await.expect_err("no server answers");
        client.set_learnt(&[learnt.address].into());
        assert_eq!(get(&client).await.expect("an answer"), "answer");
        client.set_learnt(&BTreeSet::new());
        assert_eq!(get(&client).await.expect("an answer"), "answer");
    }

    #[test]
    fn servers_at_addresses_prove_the_name_that_all_of_them_have() {
        let mut config = Config::new("https://10.96.0.1".parse().expect("a URL"));
        let of = |config: &Config, server| {
            let rotation = ApiServerRotation::new(&[], 0);
            let client = ApiServerClient {
                config: config.clone().into(),
                rotation: Arc::new(rotation.into()),
                clients: Arc::default(),
            };
            let Config { cluster_url, tls_server_name, .. } = client.config_of(&server);
            (cluster_url.to_string(), tls_server_name)
        };
        let given = |url: &str| ApiServer::Given(url.parse().expect("a URL"));
        let name = || Some("kubernetes.default.svc".to_owned());
        let learnt = ApiServer::Learnt(SocketAddr::from(([10, 0, 0, 1], 6443)));
        for (server, expected) in [
            (ApiServer::Configured, ("https://10.96.0.1/".to_owned(), None)),
            (given("https://[fd00::1]:6443"), ("https://[fd00::1]:6443/".to_owned(), name())),
            (given("https://api.example.com"), ("https://api.example.com:443/".to_owned(), None)),
            (learnt.clone(), ("https://10.0.0.1:6443/".to_owned(), name())),
        ] {
            assert_eq!(of(&config, server), expected);
        }
        let proxy = Config::new("http://127.0.0.1:8001".parse().expect("a URL"));
        assert_eq!(of(&proxy, learnt.clone()), ("https://10.0.0.1:6443/".to_owned(), name()));
        config.tls_server_name = Some("api".to_owned());
        assert_eq!(of(&config, learnt).1, config.tls_server_name, "a kubeconfig names another one");
    }
}
