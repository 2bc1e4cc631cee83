//! Clients inside the cluster that connect to a service's own port by TLS, for its cluster-local names.
#![allow(clippy::unwrap_used, reason = "tests")]

use std::{
    net::{Ipv4Addr, SocketAddr},
    time::Duration,
};

use common::{
    fixtures::certificates::{TestAuthority, TestCertificate},
    wire::ConnectionPath,
};
use rustls::AlertDescription;
use tokio::io::AsyncReadExt as _;

use crate::{
    h2c::{self, Http2TestClient},
    harness::{ActivatorFixture, OK, read_head, read_rest, service, start_pod, wait_until},
    tls_client::{client_config, leaf, open, presented, received_alert, send, set_default},
};

/// Longest name of the service inside the cluster.
const LOCAL_HOST: &str = "hello.default.svc.cluster.local";

/// Request after which the connection ends.
const GET: &str = "GET /a HTTP/1.1\r\nhost: hello.default\r\nconnection: close\r\n\r\n";

/// Lets the names of the service inside the cluster serve https, with this certificate.
fn set_local_tls(fixture: &mut ActivatorFixture, issued: Option<&TestCertificate>) {
    fixture.apply_change(|table| {
        let entry = table.services.get_mut(&service()).unwrap();
        entry.serves_local_tls = true;
        let name = entry.local_certificate().unwrap();
        match issued {
            Some(issued) => drop(table.certificates.insert(name.clone(), issued.entry(&name))),
            None => drop(table.certificates.remove(&name)),
        }
    });
}

fn own_port(fixture: &ActivatorFixture) -> SocketAddr {
    (Ipv4Addr::LOCALHOST, fixture.port).into()
}

fn handshakes(fixture: &ActivatorFixture, result: &str) -> f64 {
    fixture.metric(&format!("rouse_activator_tls_handshakes_total{{result=\"{result}\"}}"))
}

#[tokio::test]
async fn a_services_own_port_serves_https_and_http() {
    let (mut fixture, authority) = (ActivatorFixture::new().await, TestAuthority::new());
    let issued = authority.issue(&[LOCAL_HOST, "hello.default.svc", "hello.default"]);
    set_local_tls(&mut fixture, Some(&issued));
    let pod = start_pod(OK, Duration::ZERO).await;
    fixture.add_ready_pod("p", pod.address);
    // The port names the service, so an address serves as well as a name.
    for name in [LOCAL_HOST, "hello.default", "127.0.0.1"] {
        let mut client = open(own_port(&fixture), client_config(&[]), name).await.unwrap();
        assert!(presented(&client) == leaf(&issued), "{name}");
        send(&mut client, GET).await;
        let response = read_rest(&mut client).await;
        assert!(response.starts_with("HTTP/1.1 200 "), "{name}: {response}");
    }
    assert!(pod.heads().contains("x-forwarded-proto: https\r\n"), "{}", pod.heads());
    let client = open(own_port(&fixture), client_config(&["h2"]), LOCAL_HOST).await.unwrap();
    let client = Http2TestClient::over(client).await;
    assert_eq!(client.send_request(h2c::get("/"), &[]).await.unwrap().body, "hello");
    // As in Knative, plain http is served on and never redirected.
    let response = fixture.exchange(GET).await;
    assert!(response.starts_with("HTTP/1.1 200 "), "{response}");
    assert!(pod.heads().contains("x-forwarded-proto: http\r\n"), "{}", pod.heads());
    assert_eq!(handshakes(&fixture, "complete"), 4.0);
}

/// A further connection to the port of https would come to an activator again, and cost another handshake.
#[tokio::test]
async fn a_connection_of_tls_stays_open_once_the_service_is_direct() {
    let (mut fixture, authority) = (ActivatorFixture::new().await, TestAuthority::new());
    set_local_tls(&mut fixture, Some(&authority.issue(&[LOCAL_HOST])));
    let pod = start_pod(OK, Duration::ZERO).await;
    fixture.add_ready_pod("p", pod.address);
    fixture.apply_change(|table| {
        table.services.get_mut(&service()).unwrap().connection_path = ConnectionPath::Direct;
    });
    let mut client = open(own_port(&fixture), client_config(&[]), LOCAL_HOST).await.unwrap();
    for _ in 0..2 {
        send(&mut client, "GET /a HTTP/1.1\r\nhost: hello.default\r\n\r\n").await;
        let head = read_head(&mut client).await;
        assert!(head.starts_with("HTTP/1.1 200 ") && !head.contains("connection: close"), "{head}");
        client.read_exact(&mut [0; 5]).await.unwrap();
    }
    let client = open(own_port(&fixture), client_config(&["h2"]), LOCAL_HOST).await.unwrap();
    let client = Http2TestClient::over(client).await;
    for _ in 0..2 {
        assert_eq!(client.send_request(h2c::get("/"), &[]).await.unwrap().body, "hello");
    }
    assert_eq!(handshakes(&fixture, "complete"), 2.0);
    assert_eq!(fixture.metric("rouse_activator_direct_closed_connections_total"), 0.0);
    // Another connection to the port of http takes the direct path.
    let response = fixture.exchange("GET /a HTTP/1.1\r\nhost: hello.default\r\n\r\n").await;
    assert!(response.contains("connection: close\r\n"), "{response}");
}

#[tokio::test]
async fn a_request_by_tls_wakes_the_service() {
    let (mut fixture, authority) = (ActivatorFixture::new().await, TestAuthority::new());
    set_local_tls(&mut fixture, Some(&authority.issue(&[LOCAL_HOST])));
    let mut client = open(own_port(&fixture), client_config(&[]), LOCAL_HOST).await.unwrap();
    send(&mut client, GET).await;
    fixture.wait_for_queued(1).await;
    let pod = start_pod(OK, Duration::ZERO).await;
    fixture.add_ready_pod("p", pod.address);
    let response = read_rest(&mut client).await;
    assert!(response.starts_with("HTTP/1.1 200 "), "{response}");
}

/// No Revision shows its protocol. Bytes of TLS show no request of HTTP either, and the connection would be reset.
#[tokio::test]
async fn a_service_without_revisions_responds_to_clients_of_tls() {
    let (mut fixture, authority) = (ActivatorFixture::new().await, TestAuthority::new());
    set_local_tls(&mut fixture, Some(&authority.issue(&[LOCAL_HOST])));
    fixture.apply_change(|table| table.services.get_mut(&service()).unwrap().targets.clear());
    let mut client = open(own_port(&fixture), client_config(&[]), LOCAL_HOST).await.unwrap();
    send(&mut client, GET).await;
    let response = read_rest(&mut client).await;
    assert!(response.starts_with("HTTP/1.1 503 "), "{response}");
    assert!(fixture.exchange(GET).await.starts_with("HTTP/1.1 503 "));
}

/// Another replica of the controller may have told clients of the service, and has signed earlier.
#[tokio::test]
async fn a_handshake_waits_for_a_certificate_that_is_signed_a_little_later() {
    let (mut fixture, authority) = (ActivatorFixture::new().await, TestAuthority::new());
    set_local_tls(&mut fixture, None);
    let opening = tokio::spawn(open(own_port(&fixture), client_config(&[]), LOCAL_HOST));
    // Long enough for a refusal.
    tokio::time::sleep(Duration::from_millis(50)).await;
    let issued = authority.issue(&[LOCAL_HOST]);
    set_local_tls(&mut fixture, Some(&issued));
    let client = opening.await.unwrap().unwrap();
    assert!(presented(&client) == leaf(&issued));
    // The client ends its handshake first.
    wait_until(|| handshakes(&fixture, "complete") == 1.0).await;
}

/// The default certificate is for hosts outside, and clients inside trust another authority.
#[tokio::test]
async fn no_other_certificate_takes_the_place_of_a_missing_one() {
    let (mut fixture, authority) = (ActivatorFixture::new().await, TestAuthority::new());
    set_default(&mut fixture, &authority.issue(&[LOCAL_HOST]));
    set_local_tls(&mut fixture, None);
    let refused = open(own_port(&fixture), client_config(&[]), LOCAL_HOST).await.unwrap_err();
    assert_eq!(received_alert(&refused), Some(AlertDescription::UnrecognisedName));
    wait_until(|| handshakes(&fixture, "no_certificate") == 1.0).await;
}

/// Without the setting, bytes of TLS are a malformed request as before.
#[tokio::test]
async fn a_service_without_https_takes_no_handshake() {
    let (mut fixture, authority) = (ActivatorFixture::new().await, TestAuthority::new());
    set_default(&mut fixture, &authority.issue(&[LOCAL_HOST]));
    let refused = open(own_port(&fixture), client_config(&[]), LOCAL_HOST).await;
    assert!(refused.is_err());
    assert_eq!(handshakes(&fixture, "complete"), 0.0);
}
