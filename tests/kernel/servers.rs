//! Shell: real servers and real clients: requests that the eBPF programs count, compared with each server's own
//! count.
//!
//! A test has one server; its cases are clients and protocols. In each case the server first keeps some requests open
//! and reports their number; then further requests are sent, and the totals are compared. The rows of all servers are
//! written to `target/servers.md`.
#![allow(
    clippy::unwrap_used,
    clippy::disallowed_methods,
    reason = "a test panics and waits on plain threads"
)]

mod client_commands;
mod count_comparison;
mod direct_path;
mod proxies;
mod results_table;
mod server_counts;
mod server_fixture;

use self::{
    client_commands::ClientCase,
    server_fixture::{ServerFixture, built_program},
};
use crate::cluster_udp::{RESOLVED_ADDRESS, resolve_by};

/// Ports behind a proxy: of the application, and of the gRPC server.
const BACKEND_PORTS: [u16; 2] = [9080, 9081];

#[test]
fn counts_agree_with_nginx() {
    let mut fixture = ServerFixture::new("nginx");
    let nginx = proxies::nginx(&fixture, "deferred reuseport");
    fixture.start_backends();
    fixture.start(&nginx);
    fixture.http1(8);
    fixture.websockets();
    fixture.java_websockets();
    fixture.finish();
}

#[test]
fn counts_agree_with_nginx_over_http2() {
    let mut fixture = ServerFixture::new("nginx (h2)");
    let nginx = proxies::nginx(&fixture, "http2");
    fixture.start_backends();
    fixture.start(&nginx);
    fixture.http2(8);
    fixture.grpc();
    fixture.finish();
}

#[test]
fn counts_agree_with_haproxy() {
    let mut fixture = ServerFixture::new("haproxy");
    let haproxy = proxies::haproxy(&fixture);
    fixture.start_backends();
    fixture.start(&haproxy);
    fixture.http1(8);
    fixture.websockets();
    fixture.finish();
}

#[test]
fn counts_agree_with_haproxy_over_http2() {
    let mut fixture = ServerFixture::new("haproxy (h2)");
    let haproxy = proxies::haproxy(&fixture);
    fixture.start_backends();
    fixture.start(&haproxy);
    fixture.http2(8);
    // Not "cut": haproxy ends tunnels gracefully as long as it can send to a client that has gone.
    fixture.tunnels(&["reset"]);
    fixture.grpc();
    fixture.finish();
}

#[test]
fn counts_agree_with_apache() {
    let mut fixture = ServerFixture::new("Apache");
    let apache = proxies::apache(&fixture);
    fixture.start_backends();
    fixture.start(&apache);
    fixture.http1(8);
    fixture.websockets();
    fixture.finish();
}

#[test]
fn counts_agree_with_apache_over_http2() {
    let mut fixture = ServerFixture::new("Apache (h2)");
    let apache = proxies::apache(&fixture);
    fixture.start_backends();
    fixture.start(&apache);
    // Apache works on only this many streams of a connection at once while none of them is complete.
    fixture.http2(6);
    fixture.upgraded(8);
    fixture.finish();
}

#[test]
fn counts_agree_with_go() {
    let mut fixture = ServerFixture::new("Go net/http");
    let recipe = fixture.go("http");
    fixture.start(&recipe);
    fixture.http1(8);
    fixture.early_hints();
    fixture.websockets();
    fixture.finish();
}

#[test]
fn counts_agree_with_go_over_http2() {
    let mut fixture = ServerFixture::new("Go net/http (h2)");
    let recipe = fixture.go("http");
    fixture.start(&recipe);
    fixture.http2(8);
    fixture.finish();
}

#[test]
fn counts_agree_with_go_over_http2_by_upgrade() {
    let mut fixture = ServerFixture::new("Go x/net/http2/h2c");
    let recipe = fixture.go("h2c");
    fixture.start(&recipe);
    fixture.upgraded(8);
    fixture.nghttp_upgraded();
    fixture.java_upgraded(8);
    fixture.finish();
}

#[test]
fn counts_agree_with_grpc_go() {
    let mut fixture = ServerFixture::new("grpc-go");
    let recipe = fixture.go("grpc");
    fixture.start(&recipe);
    fixture.grpc();
    fixture.finish();
}

#[test]
fn counts_agree_with_hyper() {
    let mut fixture = ServerFixture::new("hyper");
    let hyper = fixture.rust("http");
    fixture.start(&hyper);
    fixture.http1(8);
    fixture.websockets();
    fixture.finish();
}

#[test]
fn counts_agree_with_hyper_over_http2() {
    let mut fixture = ServerFixture::new("hyper (h2)");
    let hyper = fixture.rust("http");
    fixture.start(&hyper);
    fixture.http2(8);
    fixture.finish();
}

#[test]
fn counts_agree_with_tonic() {
    let mut fixture = ServerFixture::new("tonic");
    let tonic = fixture.rust("grpc");
    fixture.start(&tonic);
    fixture.grpc();
    fixture.finish();
}

#[test]
fn counts_agree_with_node() {
    let mut fixture = ServerFixture::new("Node http");
    let node = fixture.node("http");
    fixture.start(&node);
    fixture.http1(8);
    fixture.early_hints();
    fixture.websockets();
    fixture.java_websockets();
    fixture.finish();
}

#[test]
fn counts_agree_with_node_over_http2() {
    let mut fixture = ServerFixture::new("Node http2");
    let node = fixture.node("h2");
    fixture.start(&node);
    fixture.http2(8);
    fixture.tunnels(&["reset", "refused", "cut"]);
    fixture.finish();
}

#[test]
fn counts_agree_with_uvicorn() {
    let mut fixture = ServerFixture::new("uvicorn");
    let uvicorn =
        fixture.python(&["/usr/bin/uvicorn", "--host", "0.0.0.0", "--port", "8080", "app:asgi"]);
    fixture.start(&uvicorn);
    fixture.http1(8);
    fixture.websockets();
    fixture.finish();
}

#[test]
fn counts_agree_with_gunicorn() {
    let mut fixture = ServerFixture::new("gunicorn (sync)");
    // By default it kills a worker whose request is held for half a minute.
    let args = "/usr/bin/gunicorn --bind 0.0.0.0:8080 --workers 4 --timeout 3600 app:wsgi";
    let gunicorn = fixture.python(&args.split(' ').collect::<Vec<_>>());
    fixture.start(&gunicorn);
    // A worker has one request at a time, and closes the connection after each.
    fixture.http1(4);
    fixture.finish();
}

#[test]
fn counts_agree_with_gunicorn_with_threads() {
    let mut fixture = ServerFixture::new("gunicorn (gthread)");
    let args = "/usr/bin/gunicorn --bind 0.0.0.0:8080 --workers 2 --threads 16 --keep-alive 60 \
                --timeout 3600 app:wsgi";
    let gunicorn = fixture.python(&args.split(' ').collect::<Vec<_>>());
    fixture.start(&gunicorn);
    fixture.http1(8);
    fixture.finish();
}

#[test]
fn counts_agree_with_hypercorn_over_http2() {
    let mut fixture = ServerFixture::new("hypercorn (h2)");
    let hypercorn = fixture.python(&["/usr/bin/hypercorn", "--bind", "0.0.0.0:8080", "app:asgi"]);
    fixture.start(&hypercorn);
    fixture.http2(8);
    fixture.upgraded(8);
    fixture.nghttp_upgraded();
    fixture.java_upgraded(8);
    // hypercorn closes the connection, and leaves streams open that the client has ended.
    fixture.tunnels_left_open();
    fixture.finish();
}

#[test]
fn counts_agree_with_grpc_python() {
    let mut fixture = ServerFixture::new("grpcio (Python)");
    let grpc = fixture.python(&["/usr/bin/python3", "app.py", "grpc"]);
    fixture.start(&grpc);
    fixture.grpc();
    fixture.finish();
}

#[test]
fn counts_agree_with_the_jdks_server() {
    let mut fixture = ServerFixture::new("JDK HttpServer");
    let jdk = fixture.java("jdk");
    fixture.start(&jdk);
    fixture.http1(8);
    fixture.finish();
}

#[test]
fn counts_agree_with_jetty() {
    let mut fixture = ServerFixture::new("Jetty");
    let jetty = fixture.java("jetty");
    fixture.start(&jetty);
    fixture.http1(8);
    fixture.finish();
}

#[test]
fn counts_agree_with_jetty_over_http2() {
    let mut fixture = ServerFixture::new("Jetty (h2)");
    let jetty = fixture.java("jetty");
    fixture.start(&jetty);
    fixture.http2(8);
    fixture.upgraded(8);
    fixture.java_upgraded(8);
    fixture.finish();
}

/// Go asks by a resolver of its own, without the C library.
#[test]
fn go_gets_answers_to_names_from_a_cluster_ip() {
    let output = resolve_by(&[&built_program("servers"), "resolve", "web.test"]);
    assert!(output.starts_with(RESOLVED_ADDRESS), "{output}");
}

/// musl asks for both families by one socket that is not connected, and drops answers of other sources.
#[test]
fn musl_gets_answers_to_names_from_a_cluster_ip() {
    let output = resolve_by(&[&built_program("resolve-musl"), "web.test"]);
    let functions = ["getaddrinfo-ipv4", "getaddrinfo-any", "gethostbyname", "res_query"];
    let expected = functions.map(|function| format!("{function} {RESOLVED_ADDRESS}\n")).concat();
    assert_eq!(output, expected);
}

/// Cases by protocol. A server can process `width` requests at once.
impl ServerFixture {
    fn http1(&mut self, width: u64) {
        self.run_case(&ClientCase::curl_keep_alive(width));
        self.run_case(&ClientCase::curl_close(width));
        self.run_case(&ClientCase::wrk(width));
        self.run_case(&ClientCase::h2load_http1(width));
    }

    /// Runs the case with 103 Early Hints.
    fn early_hints(&mut self) {
        self.run_case(&ClientCase::curl_hints());
    }

    fn websockets(&mut self) {
        self.run_case(&ClientCase::websockets("Go coder/websocket", self.go_client("websockets")));
        self.run_case(&ClientCase::websockets("Python websockets", self.python_client()));
    }

    fn java_websockets(&mut self) {
        self.run_case(&ClientCase::websockets("Java HttpClient", self.java_client("websockets")));
    }

    /// Runs WebSockets over HTTP/2, and such that are broken off in these ways.
    fn tunnels(&mut self, ends: &[&str]) {
        self.run_case(&ClientCase::tunnels(ends));
    }

    fn tunnels_left_open(&mut self) {
        self.run_case(&ClientCase::tunnels_left_open());
    }

    fn http2(&mut self, width: u64) {
        self.run_case(&ClientCase::curl_http2(width));
        self.run_case(&ClientCase::go_http2(&self.go_client("requests"), width));
        self.run_case(&ClientCase::h2load_http2(width));
    }

    fn upgraded(&mut self, width: u64) {
        self.run_case(&ClientCase::curl_upgrade(width));
    }

    /// Runs nghttp where the 101 arrives alone: nghttp 1.52 ends early if more arrives with it, as from Apache and
    /// Jetty.
    fn nghttp_upgraded(&mut self) {
        self.run_case(&ClientCase::nghttp_upgrade());
        self.run_case(&ClientCase::nghttp_upgrade_keep_alive());
    }

    fn java_upgraded(&mut self, width: u64) {
        self.run_case(&ClientCase::java_upgrade(self.java_client("requests"), width));
    }

    fn grpc(&mut self) {
        self.run_case(&ClientCase::grpcurl(&self.grpcurl()));
        self.run_case(&ClientCase::h2load_grpc(8));
    }
}
