//! Clients inside the cluster that connect to a service's own port by TLS, for its cluster-local names.
#![allow(clippy::unwrap_used, reason = "tests")]

use std::{
    net::{Ipv4Addr, SocketAddr},
    time::Duration,
};

use common::fixtures::certificates::{TestAuthority, TestCertificate};
use rustls::AlertDescription;

use crate::{
    h2c::{self, Http2TestClient},
    harness::{ActivatorFixture, OK, read_rest, service, start_pod, wait_until},
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
