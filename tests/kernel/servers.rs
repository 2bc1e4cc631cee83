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

mod calls;
mod own;
mod play;
mod proxies;
mod stage;
mod straight;
mod table;

use self::{calls::ClientCase, stage::ServerFixture};

/// Ports behind a proxy: of the application, and of the gRPC server.
const BACKEND_PORTS: [u16; 2] = [9080, 9081];

#[test]
fn nginx_agrees() {
    let mut stage = ServerFixture::new("nginx");
    let nginx = proxies::nginx(&stage, "deferred reuseport");
    stage.start_backends();
    stage.start(&nginx);
    stage.http1(8);
    stage.websockets();
    stage.java_websockets();
    stage.finish();
}

#[test]
fn nginx_agrees_over_http2() {
    let mut stage = ServerFixture::new("nginx (h2)");
    let nginx = proxies::nginx(&stage, "http2");
    stage.start_backends();
    stage.start(&nginx);
    stage.http2(8);
    stage.grpc();
    stage.finish();
}

#[test]
fn haproxy_agrees() {
    let mut stage = ServerFixture::new("haproxy");
    let haproxy = proxies::haproxy(&stage);
    stage.start_backends();
    stage.start(&haproxy);
    stage.http1(8);
    stage.websockets();
    stage.finish();
}

#[test]
fn haproxy_agrees_over_http2() {
    let mut stage = ServerFixture::new("haproxy (h2)");
    let haproxy = proxies::haproxy(&stage);
    stage.start_backends();
    stage.start(&haproxy);
    stage.http2(8);
    // Not "cut": haproxy ends tunnels in order as long as it can send to a client that has gone.
    stage.tunnels(&["reset"]);
    stage.grpc();
    stage.finish();
}

#[test]
fn apache_agrees() {
    let mut stage = ServerFixture::new("Apache");
    let apache = proxies::apache(&stage);
    stage.start_backends();
    stage.start(&apache);
    stage.http1(8);
    stage.websockets();
    stage.finish();
}

#[test]
fn apache_agrees_over_http2() {
    let mut stage = ServerFixture::new("Apache (h2)");
    let apache = proxies::apache(&stage);
    stage.start_backends();
    stage.start(&apache);
    // Apache works on only this many streams of a connection at once while none of them is complete.
    stage.http2(6);
    stage.upgraded(8);
    stage.finish();
}

#[test]
fn go_agrees() {
    let mut stage = ServerFixture::new("Go net/http");
    let go = stage.go("http");
    stage.start(&go);
    stage.http1(8);
    stage.early_hints();
    stage.websockets();
    stage.finish();
}

#[test]
fn go_agrees_over_http2() {
    let mut stage = ServerFixture::new("Go net/http (h2)");
    let go = stage.go("http");
    stage.start(&go);
    stage.http2(8);
    stage.finish();
}

#[test]
fn go_agrees_over_http2_by_upgrade() {
    let mut stage = ServerFixture::new("Go x/net/http2/h2c");
    let go = stage.go("h2c");
    stage.start(&go);
    stage.upgraded(8);
    stage.nghttp_upgraded();
    stage.java_upgraded(8);
    stage.finish();
}

#[test]
fn grpc_go_agrees() {
    let mut stage = ServerFixture::new("grpc-go");
    let go = stage.go("grpc");
    stage.start(&go);
    stage.grpc();
    stage.finish();
}

#[test]
fn hyper_agrees() {
    let mut stage = ServerFixture::new("hyper");
    let hyper = stage.rust("http");
    stage.start(&hyper);
    stage.http1(8);
    stage.websockets();
    stage.finish();
}

#[test]
fn hyper_agrees_over_http2() {
    let mut stage = ServerFixture::new("hyper (h2)");
    let hyper = stage.rust("http");
    stage.start(&hyper);
    stage.http2(8);
    stage.finish();
}

#[test]
fn tonic_agrees() {
    let mut stage = ServerFixture::new("tonic");
    let tonic = stage.rust("grpc");
    stage.start(&tonic);
    stage.grpc();
    stage.finish();
}

#[test]
fn node_agrees() {
    let mut stage = ServerFixture::new("Node http");
    let node = stage.node("http");
    stage.start(&node);
    stage.http1(8);
    stage.early_hints();
    stage.websockets();
    stage.java_websockets();
    stage.finish();
}

#[test]
fn node_agrees_over_http2() {
    let mut stage = ServerFixture::new("Node http2");
    let node = stage.node("h2");
    stage.start(&node);
    stage.http2(8);
    stage.tunnels(&["reset", "refused", "cut"]);
    stage.finish();
}

#[test]
fn uvicorn_agrees() {
    let mut stage = ServerFixture::new("uvicorn");
    let uvicorn =
        stage.python(&["/usr/bin/uvicorn", "--host", "0.0.0.0", "--port", "8080", "app:asgi"]);
    stage.start(&uvicorn);
    stage.http1(8);
    stage.websockets();
    stage.finish();
}

#[test]
fn gunicorn_agrees() {
    let mut stage = ServerFixture::new("gunicorn (sync)");
    let words = ["/usr/bin/gunicorn", "--bind", "0.0.0.0:8080", "--workers", "4", "app:wsgi"];
    let gunicorn = stage.python(&words);
    stage.start(&gunicorn);
    // A worker has one request at a time, and closes the connection after each.
    stage.http1(4);
    stage.finish();
}

#[test]
fn gunicorn_with_threads_agrees() {
    let mut stage = ServerFixture::new("gunicorn (gthread)");
    let words =
        "/usr/bin/gunicorn --bind 0.0.0.0:8080 --workers 2 --threads 16 --keep-alive 5 app:wsgi";
    let gunicorn = stage.python(&words.split(' ').collect::<Vec<_>>());
    stage.start(&gunicorn);
    stage.http1(8);
    stage.finish();
}

#[test]
fn hypercorn_agrees_over_http2() {
    let mut stage = ServerFixture::new("hypercorn (h2)");
    let hypercorn = stage.python(&["/usr/bin/hypercorn", "--bind", "0.0.0.0:8080", "app:asgi"]);
    stage.start(&hypercorn);
    stage.http2(8);
    stage.upgraded(8);
    stage.nghttp_upgraded();
    stage.java_upgraded(8);
    // hypercorn closes the connection, and leaves streams open that the client has ended.
    stage.tunnels_left_open();
    stage.finish();
}

#[test]
fn grpc_python_agrees() {
    let mut stage = ServerFixture::new("grpcio (Python)");
    let grpc = stage.python(&["/usr/bin/python3", "app.py", "grpc"]);
    stage.start(&grpc);
    stage.grpc();
    stage.finish();
}

#[test]
fn the_jdks_server_agrees() {
    let mut stage = ServerFixture::new("JDK HttpServer");
    let jdk = stage.java("jdk");
    stage.start(&jdk);
    stage.http1(8);
    stage.finish();
}

#[test]
fn jetty_agrees() {
    let mut stage = ServerFixture::new("Jetty");
    let jetty = stage.java("jetty");
    stage.start(&jetty);
    stage.http1(8);
    stage.finish();
}

#[test]
fn jetty_agrees_over_http2() {
    let mut stage = ServerFixture::new("Jetty (h2)");
    let jetty = stage.java("jetty");
    stage.start(&jetty);
    stage.http2(8);
    stage.upgraded(8);
    stage.java_upgraded(8);
    stage.finish();
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
