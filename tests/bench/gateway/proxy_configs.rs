//! Pure: configurations of nginx as the pod, and of the proxies that the activator is compared with.
//!
//! All proxies do the same work for a request: they forward `Host`, add `X-Forwarded-For`, keep connections to the pod,
//! and write no access log. Each runs as one process with one worker.

use std::{fmt::Write as _, net::Ipv4Addr, path::Path};

use crate::cases::GatewayPort;

/// Address of all pods.
pub(crate) const POD_ADDRESS: Ipv4Addr = Ipv4Addr::LOCALHOST;

/// Files that configurations refer to.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ProxyFiles<'a> {
    /// Folder for the process id and temporary files of this process.
    pub(crate) folder: &'a Path,
    /// Certificate chain in PEM.
    pub(crate) certificate: &'a Path,
    /// Private key in PEM.
    pub(crate) key: &'a Path,
    /// Certificate chain and private key in one file in PEM.
    pub(crate) certificate_and_key: &'a Path,
}

/// Configuration of nginx as the pod: small responses at `/`, 1 MiB at `/bulk`, from `folder`.
pub(crate) fn nginx_pod(files: &ProxyFiles<'_>) -> String {
    let [h1, h2c, tls] = [GatewayPort::H1, GatewayPort::H2c, GatewayPort::Tls]
        .map(|port| format!("{POD_ADDRESS}:{}", port.number()));
    let responses = format!(
        "root {}; location = / {{ return 200 hello; }} location = /bulk {{ }}",
        files.folder.display()
    );
    let servers = format!(
        "server {{ listen {h1} backlog=65535; listen {tls} ssl http2 backlog=65535; {responses} }}
         server {{ listen {h2c} http2 backlog=65535; {responses} }}"
    );
    nginx_config(files, &servers)
}

/// Configuration of nginx as a reverse proxy that listens on `address`.
pub(crate) fn nginx_proxy(address: Ipv4Addr, files: &ProxyFiles<'_>) -> String {
    let [h1, h2c, tls, grpc] =
        [GatewayPort::H1, GatewayPort::H2c, GatewayPort::Tls, GatewayPort::Grpc]
            .map(GatewayPort::number);
    let forward = "location / {
            proxy_pass http://pod; proxy_http_version 1.1; proxy_set_header Connection '';
            proxy_set_header Host $host; proxy_set_header X-Forwarded-Proto $scheme;
            proxy_set_header X-Forwarded-For $proxy_add_x_forwarded_for;
            proxy_buffers 8 64k; proxy_max_temp_file_size 0;
        }";
    let servers = format!(
        "upstream pod {{
            server {POD_ADDRESS}:{h1}; keepalive 1024; keepalive_requests 1000000000;
        }}
        upstream grpc {{
            server {POD_ADDRESS}:{grpc}; keepalive 1024; keepalive_requests 1000000000;
        }}
        server {{
            listen {address}:{h1} backlog=65535; listen {address}:{tls} ssl http2 backlog=65535;
            {forward}
        }}
        server {{ listen {address}:{h2c} http2 backlog=65535; {forward} }}
        server {{
            listen {address}:{grpc} http2 backlog=65535;
            location / {{
                grpc_pass grpc://grpc; grpc_set_header Host $host;
                grpc_set_header X-Forwarded-For $proxy_add_x_forwarded_for;
            }}
        }}"
    );
    nginx_config(files, &servers)
}

/// Configuration of one nginx process, whose servers have TLS with the certificate.
fn nginx_config(files: &ProxyFiles<'_>, servers: &str) -> String {
    let at = files.folder.display();
    format!(
        "daemon off; master_process off; pid {at}/pid; error_log stderr crit;
        events {{ worker_connections 40000; multi_accept on; }}
        http {{
            access_log off; sendfile on; tcp_nopush on; open_file_cache max=8;
            keepalive_requests 1000000000; keepalive_timeout 600;
            ssl_certificate {}; ssl_certificate_key {};
            {servers}
        }}",
        files.certificate.display(),
        files.key.display()
    )
}

/// Configuration of HAProxy that listens on `address`. It starts where fewer files may be open than it would like.
pub(crate) fn haproxy(address: Ipv4Addr, files: &ProxyFiles<'_>) -> String {
    let [h1, h2c, tls, grpc] =
        [GatewayPort::H1, GatewayPort::H2c, GatewayPort::Tls, GatewayPort::Grpc]
            .map(GatewayPort::number);
    let certificate = files.certificate_and_key.display();
    format!(
        "global
    nbthread 1
    no strict-limits
    maxconn 40000
defaults
    mode http
    option forwardfor
    http-reuse always
    backlog 65535
    maxconn 40000
    timeout connect 5s
    timeout client 600s
    timeout server 600s
    timeout http-keep-alive 600s
    timeout http-request 60s
frontend pod
    bind {address}:{h1}
    bind {address}:{h2c} proto h2
    bind {address}:{tls} ssl crt {certificate} alpn h2,http/1.1
    default_backend pod
frontend grpc
    bind {address}:{grpc} proto h2
    default_backend grpc
backend pod
    server pod {POD_ADDRESS}:{h1}
backend grpc
    server grpc {POD_ADDRESS}:{grpc} proto h2
"
    )
}

/// Configuration of Envoy that listens on `address`. Its bounds are beyond what any case reaches.
pub(crate) fn envoy(address: Ipv4Addr, files: &ProxyFiles<'_>) -> String {
    let mut listeners = String::new();
    for port in [GatewayPort::H1, GatewayPort::H2c, GatewayPort::Tls, GatewayPort::Grpc] {
        envoy_listener(&mut listeners, address, port, files);
    }
    let pod = envoy_cluster("pod", GatewayPort::H1, "");
    let http2 = r#", typed_extension_protocol_options: { envoy.extensions.upstreams.http.v3.HttpProtocolOptions: {
      "@type": type.googleapis.com/envoy.extensions.upstreams.http.v3.HttpProtocolOptions,
      explicit_http_config: { http2_protocol_options: {} } } }"#;
    let grpc = envoy_cluster("grpc", GatewayPort::Grpc, http2);
    format!("static_resources:\n  listeners:\n{listeners}  clusters:\n{pod}{grpc}")
}

/// Appends one listener of Envoy to `out`, in YAML's flow style.
fn envoy_listener(out: &mut String, address: Ipv4Addr, port: GatewayPort, files: &ProxyFiles<'_>) {
    let cluster = if port == GatewayPort::Grpc { "grpc" } else { "pod" };
    let tls = if port == GatewayPort::Tls {
        format!(
            r#", transport_socket: {{ name: tls, typed_config: {{
      "@type": type.googleapis.com/envoy.extensions.transport_sockets.tls.v3.DownstreamTlsContext,
      common_tls_context: {{ alpn_protocols: [h2, http/1.1], tls_certificates: [{{
        certificate_chain: {{ filename: "{}" }}, private_key: {{ filename: "{}" }} }}] }} }} }}"#,
            files.certificate.display(),
            files.key.display()
        )
    } else {
        String::new()
    };
    let number = port.number();
    // Writing to a string cannot fail.
    let _ = writeln!(
        out,
        r#"  - {{ name: port{number}, tcp_backlog_size: 65535,
    address: {{ socket_address: {{ address: "{address}", port_value: {number} }} }},
    filter_chains: [{{ filters: [{{ name: http, typed_config: {{
      "@type": type.googleapis.com/envoy.extensions.filters.network.http_connection_manager.v3.HttpConnectionManager,
      stat_prefix: port{number}, codec_type: AUTO, use_remote_address: true,
      route_config: {{ virtual_hosts: [{{ name: all, domains: ["*"],
        routes: [{{ match: {{ prefix: "/" }}, route: {{ cluster: {cluster}, timeout: 0s }} }}] }}] }},
      http_filters: [{{ name: router, typed_config: {{
        "@type": type.googleapis.com/envoy.extensions.filters.http.router.v3.Router }} }}]
    }} }}]{tls} }}] }}"#
    );
}

/// One cluster of Envoy with a pod's port, and `protocol` options behind it.
fn envoy_cluster(name: &str, port: GatewayPort, protocol: &str) -> String {
    let number = port.number();
    format!(
        r#"  - {{ name: {name}, type: STATIC, connect_timeout: 5s,
    circuit_breakers: {{ thresholds: [{{ max_connections: 100000, max_pending_requests: 100000,
      max_requests: 100000 }}] }},
    load_assignment: {{ cluster_name: {name}, endpoints: [{{ lb_endpoints: [{{ endpoint: {{
      address: {{ socket_address: {{ address: "{POD_ADDRESS}", port_value: {number} }} }} }} }}] }}] }}{protocol} }}
"#
    )
}
