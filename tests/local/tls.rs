//! TLS at the gateway: third-party clients, beginning with a sleeping service, and certificate files that are renewed
//! or cannot be used.

use std::path::Path;
use std::process::{Command, Stdio};

use tests::multi_process_node::MultiProcessNode;
use tests::rouse_node::RouseNode;
use tests::test_cluster::required_variable;
use tests::test_node::find_leftovers;
use tests::tls_client::{TlsClients, client_script};
use tests::tls_files::{TlsFiles, certificate_in, first_certificate};
use tests::wait::wait_for;

const HELLO: &str = include_str!("../../examples/hello.yaml");
/// Host of the sample service, for which only the wildcard of the pair is valid.
const HOST: &str = "hello.default.localhost";
/// Host that a certificate of the folder names.
const EXACT_HOST: &str = "exact.default.localhost";
/// Host that no certificate names.
const UNKNOWN_HOST: &str = "other.example";
/// Requests of each client in another language.
const REQUESTS_OF_CLIENT: usize = 50;

/// Starts a node with a wildcard pair, and a folder with a pair of one host.
fn start_node(test: &str, files: &TlsFiles) -> (RouseNode, TlsClients) {
    files.add_pair("exact", &[EXACT_HOST]);
    let node = RouseNode::start_with_tls(test, files);
    let gateway = node.tls_gateway.expect("it was started with certificates");
    let clients = TlsClients { gateway, authority: files.authority(), runner: Vec::new() };
    assert!(node.apply(HELLO).0);
    node.wait_ready("hello");
    (node, clients)
}

#[test]
fn third_party_clients_speak_tls_with_a_service_that_slept() {
    let folder = tempfile::tempdir().expect("a folder");
    let files = TlsFiles::new(folder.path(), &["*.default.localhost"]);
    let (node, clients) = start_node("tls-clients", &files);
    node.wait_asleep("hello");
    assert_eq!(clients.curl(HOST, &["--http2"]), "200 2");
    assert_eq!(clients.curl(HOST, &["--http1.1"]), "200 1.1");
    assert_eq!(clients.curl(HOST, &["--http2", "--tls-max", "1.2"]), "200 2");
    check_handshakes(&clients, &files);
    clients.h2load(HOST, 2000);
    check_clients_in_other_languages(&clients);
    check_redirect(&node, &clients);
    check_routes(&node);
}

/// Checks what OpenSSL's client sees: chains, names, ALPN and versions.
fn check_handshakes(clients: &TlsClients, files: &TlsFiles) {
    let pair = certificate_in(&files.certificate());
    assert_eq!(clients.served_certificate(HOST), Some(pair.clone()));
    let exact = certificate_in(&files.folder().join("exact.crt"));
    assert_eq!(clients.served_certificate(EXACT_HOST), Some(exact));
    assert_eq!(clients.served_certificate(UNKNOWN_HOST), Some(pair.clone()), "the default");
    let unnamed = clients.s_client(&["-noservername"]);
    assert_eq!(first_certificate(&unnamed), Some(pair), "the default");

    let verified = clients.s_client(&["-servername", HOST, "-verify_hostname", HOST]);
    assert!(verified.contains("Verify return code: 0 (ok)"), "{verified}");
    for (offered, chosen) in [
        ("h2,http/1.1", "ALPN protocol: h2"),
        ("http/1.1,h2", "ALPN protocol: h2"),
        ("http/1.1", "ALPN protocol: http/1.1"),
    ] {
        let output = clients.s_client(&["-servername", HOST, "-alpn", offered]);
        assert!(output.contains(chosen), "{offered}: {output}");
    }
    let without_alpn = clients.s_client(&["-servername", HOST]);
    assert!(without_alpn.contains("No ALPN negotiated"), "{without_alpn}");

    // At its usual security level the client would refuse TLS 1.1 itself.
    let old = ["-servername", HOST, "-tls1_1", "-cipher", "DEFAULT@SECLEVEL=0"];
    let refused = clients.s_client(&old);
    // Alert `protocol_version`, or `handshake_failure` if no cipher suite is common (RFC 8446 §6.2).
    let is_refused = ["alert number 70", "alert number 40"].iter().any(|it| refused.contains(it));
    assert!(is_refused && first_certificate(&refused).is_none(), "{refused}");
}

fn check_clients_in_other_languages(clients: &TlsClients) {
    let (node, python) = (client_script("tls.mjs"), client_script("tls.py"));
    let go = Path::new(&required_variable("ROUSE_SERVERS")).join("servers");
    let http1 = format!("HTTP/1.1 {REQUESTS_OF_CLIENT}\n");
    let http2 = format!("HTTP/2.0 {REQUESTS_OF_CLIENT}\n");
    let run = |program: &[&str]| clients.run_https(program, HOST, REQUESTS_OF_CLIENT);
    assert_eq!(run(&[&go.to_string_lossy()]), http2);
    assert_eq!(run(&["node", &node]), http1.clone() + &http2);
    assert_eq!(run(&["python3", &python]), http1);
}

/// Checks that a service with `http-protocol: redirected` redirects to the port of TLS, and is served there.
fn check_redirect(node: &RouseNode, clients: &TlsClients) {
    let name = "name: redirected
  annotations:
    networking.knative.dev/http-protocol: redirected";
    assert!(node.apply(&HELLO.replace("name: hello", name)).0);
    node.wait_ready("redirected");
    let host = "redirected.default.localhost";
    let response = tests::http_client::get(node.gateway, host, "/path?query=1");
    let response = response.expect("the gateway responds");
    let location = format!("{}path?query=1", clients.url(host));
    assert_eq!((response.status, response.header("location")), (301, location.as_str()));
    assert_eq!(clients.curl(host, &["--http2"]), "200 2");
    assert_eq!(clients.curl(host, &["--http1.1"]), "200 1.1");
}

/// Checks that the activator shows hosts with their certificates, and explains the choice for a request.
fn check_routes(node: &RouseNode) {
    let table = node.run_rouse(&["routes", HOST, "--no-headers"]);
    let (row, certificate) = (table.trim_end(), ".crt");
    assert!(row.starts_with(HOST) && row.lines().count() == 1, "{table}");
    assert!(row.contains("default/hello-00001") && row.ends_with(certificate), "{table}");
    let trace = node.run_rouse(&["trace", HOST, "/path", "--tls"]);
    assert!(trace.contains("goes to a Revision of default/hello\n"), "{trace}");
    assert!(trace.contains("(wildcard)\n"), "{trace}");
    let trace = node.run_rouse(&["trace", "redirected.default.localhost"]);
    assert!(trace.contains("is redirected with status 301 to https://"), "{trace}");
    let trace = node.run_rouse(&["trace", UNKNOWN_HOST]);
    assert!(trace.contains("is refused with status 404\n"), "{trace}");
}

#[test]
fn renewed_files_are_served_without_a_failed_request_and_broken_ones_are_not() {
    let folder = tempfile::tempdir().expect("a folder");
    let files = TlsFiles::new(folder.path(), &["*.default.localhost"]);
    let (node, clients) = start_node("tls-renewal", &files);
    // The load begins with a service that is awake.
    assert_eq!(clients.curl(HOST, &[]), "200 2");
    let wait_served = |host: &str, certificate: &str| {
        wait_for(&format!("the new certificate of {host}"), || {
            (clients.served_certificate(host).as_deref() == Some(certificate)).then_some(())
        });
    };
    clients.with_load(HOST, |load| {
        for _ in 0..3 {
            files.renew();
            wait_served(HOST, &certificate_in(&files.certificate()));
            load.wait_for_another_run();
        }
        let late = files.add_pair("late", &["late.default.localhost"]);
        wait_served("late.default.localhost", &certificate_in(&late));

        files.break_key();
        wait_for("the fault in the log", || {
            node.log().contains("certificate cannot be used").then_some(())
        });
        load.wait_for_another_run();
        let kept = certificate_in(&files.certificate());
        assert_eq!(clients.served_certificate(HOST), Some(kept));

        files.renew();
        wait_served(HOST, &certificate_in(&files.certificate()));
    });
}

#[test]
fn a_pair_that_cannot_be_used_ends_up_before_there_is_a_node() {
    let node = MultiProcessNode::new("tls-bad");
    let folder = tempfile::tempdir().expect("a folder");
    let files = TlsFiles::new(folder.path(), &["*.default.localhost"]);
    files.break_key();
    // A node that starts all the same would run forever.
    let mut up_command = Command::new("timeout");
    up_command.args(["60", &required_variable("ROUSE_BIN"), "--node", node.layout.name(), "up"]);
    up_command.args(["--gateway", "127.0.0.1:0", "--tls-gateway", "127.0.0.1:0", "--tls-cert"]);
    up_command.arg(files.certificate()).arg("--tls-key").arg(files.key());
    let output = up_command.env("NO_COLOR", "1").stdin(Stdio::null()).output();
    let output = output.expect("the rouse program");
    let stderr = String::from_utf8_lossy(&output.stderr);
    let fault = format!(
        "{} and {} cannot be used: tls.key holds no private key in PEM",
        files.certificate().display(),
        files.key().display()
    );
    assert!(stderr.contains(&fault), "{output:?}");
    assert_eq!(output.status.code(), Some(1), "{output:?}");
    assert_eq!(find_leftovers(node.layout.name()), [] as [String; 0]);
}
