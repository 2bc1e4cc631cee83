//! Ingresses of other controllers, which choose a Revision by headers: those that are trusted, and all other senders.
#![allow(clippy::unwrap_used, reason = "tests")]

use std::{
    net::{Ipv4Addr, SocketAddr},
    time::Duration,
};

use common::{
    fixtures,
    wire::{NamespacedName, RevisionEntry, RoutingPhase},
};
use http::Request;
use tokio::{io::AsyncWriteExt as _, net::TcpStream};

use crate::{
    h2c::Http2TestClient,
    harness::{ActivatorFixture, FakeHttp1Pod, LONG, OK, read_rest, start_pod},
};

/// Host that no service of the table has: that of a Route whose public hosts another ingress fronts.
const FOREIGN_HOST: &str = "fronted.example";
const OWN_HOST: &str = "hello.default.example.com";

/// Activator with the Revision `hello-1`, which has all traffic of `hello`, and `hello-2`, which has none.
struct IngressFixture {
    activator: ActivatorFixture,
    first: FakeHttp1Pod,
    second: FakeHttp1Pod,
}

impl IngressFixture {
    /// Starts the activator with a trusted network.
    async fn start(trusted: &str) -> Self {
        let mut activator = ActivatorFixture::new().await;
        let (first, second) =
            (start_pod(OK, Duration::ZERO).await, start_pod(OK, Duration::ZERO).await);
        activator.add_ready_pod("p", first.address);
        let name = NamespacedName::new("default", "hello-2");
        activator.apply_change(|table| {
            let pod = fixtures::pod_at("q", &name, RoutingPhase::Ready, second.address);
            table.pods.insert("q".to_owned(), pod);
            let entry = RevisionEntry { timeout: LONG, ..fixtures::revision(&name, "hello") };
            table.revisions.insert(name, entry);
            table.settings.edge.trusted_ingresses = vec![trusted.parse().unwrap()];
        });
        Self { activator, first, second }
    }

    async fn status(&self, address: SocketAddr, host: &str, fields: &str) -> String {
        let response = self.activator.exchange_at(address, &get(host, fields)).await;
        response.get(9..12).unwrap_or(&response).to_owned()
    }

    /// Returns the numbers of requests at the pods of both Revisions.
    fn requests(&self) -> (usize, usize) {
        (self.first.requests(), self.second.requests())
    }
}

fn get(host: &str, fields: &str) -> String {
    format!("GET /a?b=c HTTP/1.1\r\nhost: {host}\r\nconnection: close\r\n{fields}\r\n")
}

fn chosen(revision: &str) -> String {
    format!("Knative-Serving-Namespace: default\r\nKnative-Serving-Revision: {revision}\r\n")
}

#[tokio::test]
async fn a_trusted_ingress_chooses_the_revision() {
    let fixture = IngressFixture::start("127.0.0.0/8").await;
    let inside = fixture.activator.inside;
    let fields = chosen("hello-2") + "knative-serving-tag: blue\r\nk-original-host: forged\r\n";
    assert_eq!(fixture.status(inside, FOREIGN_HOST, &fields).await, "200");
    let heads = fixture.second.heads();
    for kept in ["host: fronted.example\r\n", "knative-serving-tag: blue\r\n"] {
        assert!(heads.contains(kept), "{heads}");
    }
    for removed in ["knative-serving-revision", "knative-serving-namespace", "k-original-host"] {
        assert!(!heads.contains(removed), "{heads}");
    }
    // The host of another service counts no more than a foreign one: the ingress has divided the traffic.
    assert_eq!(fixture.status(inside, OWN_HOST, &chosen("hello-2")).await, "200");
    let request = Request::get(format!("http://{FOREIGN_HOST}/"))
        .header("knative-serving-namespace", "default")
        .header("knative-serving-revision", "hello-1");
    let response = Http2TestClient::connect_to(inside).await.send_request(request, &[]).await;
    assert_eq!(response.unwrap().head.status(), 200);
    assert_eq!(fixture.requests(), (1, 2));
}

#[tokio::test]
async fn a_revision_that_a_trusted_ingress_chooses_is_waited_for() {
    let mut fixture = ActivatorFixture::new().await;
    fixture.apply_change(|table| {
        table.settings.edge.trusted_ingresses = vec!["127.0.0.1/32".parse().unwrap()];
    });
    let mut stream = TcpStream::connect(fixture.inside).await.unwrap();
    let request = get(FOREIGN_HOST, &chosen("hello-1"));
    stream.write_all(request.as_bytes()).await.unwrap();
    fixture.wait_for_queued(1).await;
    let pod = start_pod(OK, Duration::ZERO).await;
    fixture.add_ready_pod("p", pod.address);
    let response = read_rest(&mut stream).await;
    assert!(response.starts_with("HTTP/1.1 200"), "{response}");
}

#[tokio::test]
async fn headers_of_all_other_senders_choose_no_revision() {
    let mut fixture = IngressFixture::start("192.0.2.0/24").await;
    let fields = chosen("hello-2") + "knative-serving-tag: blue\r\n";
    let ActivatorFixture { inside, outside, port, .. } = fixture.activator;
    let own_port = SocketAddr::from((Ipv4Addr::LOCALHOST, port));
    assert_eq!(fixture.status(inside, FOREIGN_HOST, &fields).await, "404");
    assert_eq!(fixture.status(inside, OWN_HOST, &fields).await, "200");
    // At other entrypoints the headers of a trusted ingress choose none either.
    fixture.activator.apply_change(|table| {
        table.settings.edge.trusted_ingresses = vec!["127.0.0.0/8".parse().unwrap()];
    });
    assert_eq!(fixture.status(outside, FOREIGN_HOST, &fields).await, "404");
    assert_eq!(fixture.status(outside, OWN_HOST, &fields).await, "200");
    assert_eq!(fixture.status(own_port, FOREIGN_HOST, &chosen("hello-2")).await, "200");
    assert_eq!(fixture.requests(), (3, 0));
    assert!(!fixture.first.heads().contains("knative-serving"), "{}", fixture.first.heads());
}

#[tokio::test]
async fn headers_that_name_no_known_revision_reach_no_pod() {
    let fixture = IngressFixture::start("127.0.0.0/8").await;
    let inside = fixture.activator.inside;
    let request = get(OWN_HOST, &chosen("hello-9"));
    let response = fixture.activator.exchange_at(inside, &request).await;
    assert!(response.starts_with("HTTP/1.1 404"), "{response}");
    let text = "Error getting active endpoint: revision \"default/hello-9\" not found";
    assert!(response.ends_with(text), "{response}");
    // An ingress that passes on its client's own header beside its own has chosen nothing, and the host counts.
    for fields in [
        chosen("hello-2") + "Knative-Serving-Revision: hello-1\r\n",
        "Knative-Serving-Revision: hello-2\r\n".to_owned(),
        "Knative-Serving-Namespace: default\r\nKnative-Serving-Revision:\r\n".to_owned(),
    ] {
        assert_eq!(fixture.status(inside, FOREIGN_HOST, &fields).await, "404", "{fields}");
    }
    assert_eq!(fixture.requests(), (0, 0));
}
