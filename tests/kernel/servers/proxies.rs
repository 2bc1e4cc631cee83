//! Shell: proxies in front of applications: nginx, haproxy and Apache's httpd, each with a configuration of the
//! tests.

use std::fs;

use super::{
    BACKEND_PORTS,
    server_counts::ServerCountSource,
    server_fixture::{ServerFixture, ServerRecipe},
};
use crate::fixture::SERVING_PORT;

/// Recipe of nginx with these options of `listen`. It responds to some requests itself, and passes others to an
/// application.
pub(super) fn nginx(fixture: &ServerFixture, listen: &str) -> ServerRecipe {
    let folder = fixture.path("nginx");
    fs::create_dir(&folder).unwrap();
    fs::write(folder.join("big"), vec![b'x'; 1 << 20]).unwrap();
    let path = folder.display();
    let [http, grpc] = BACKEND_PORTS;
    let config = format!(
        "daemon off; user root; worker_processes 2; pid {path}/pid; error_log stderr error;
        events {{ worker_connections 512; }}
        http {{
          access_log {path}/log; keepalive_requests 1000000; client_max_body_size 8m; sendfile on;
          client_body_temp_path {path}; proxy_temp_path {path}; fastcgi_temp_path {path}; uwsgi_temp_path {path};
          scgi_temp_path {path};
          upstream app {{ server 127.0.0.1:{http}; keepalive 16; }}
          map $http_upgrade $connection_upgrade {{ default upgrade; '' ''; }}
          server {{
            listen {SERVING_PORT} {listen};
            location = /hello {{ return 200 hello; }}
            location = /big {{ root {path}; }}
            location = /early {{ client_max_body_size 1k; proxy_pass http://app; }}
            location / {{
              proxy_pass http://app; proxy_http_version 1.1; proxy_read_timeout 1h;
              proxy_set_header Upgrade $http_upgrade; proxy_set_header Connection $connection_upgrade;
            }}
            location /servers.Echo/ {{ grpc_pass grpc://127.0.0.1:{grpc}; grpc_read_timeout 1h; }}
          }}
          server {{ listen unix:{path}/status; access_log off; location / {{ stub_status; }} }}
        }}"
    );
    let file = folder.join("conf");
    fs::write(&file, config).unwrap();
    let args = ["nginx", "-c", &file.display().to_string()].map(str::to_owned).to_vec();
    ServerRecipe {
        words: args,
        count_source: ServerCountSource::Nginx {
            log: folder.join("log"),
            status: folder.join("status"),
        },
    }
}

/// Recipe of haproxy, whose listener defers accepts. It writes its log to its standard output, which the fixture keeps in
/// `server.out`.
pub(super) fn haproxy(fixture: &ServerFixture) -> ServerRecipe {
    let (file, stats) = (fixture.path("haproxy.cfg"), fixture.path("haproxy.stats"));
    let [http, grpc] = BACKEND_PORTS;
    // With one thread: of two lines written at the same time, haproxy would omit one.
    let config = format!(
        "global
  log stdout format raw local0
  stats socket {}
  nbthread 1
defaults
  mode http
  log global
  option httplog
  option dontlognull
  timeout connect 120s
  timeout client 1h
  timeout server 1h
  timeout tunnel 1h
frontend in
  bind :{SERVING_PORT} defer-accept
  http-request return status 200 content-type text/plain string hello if {{ path /hello }}
  http-request return status 413 if {{ path /early }}
  use_backend grpc if {{ path_beg /servers.Echo/ }}
  default_backend app
backend app
  server app 127.0.0.1:{http}
backend grpc
  server grpc 127.0.0.1:{grpc} proto h2
",
        stats.display()
    );
    fs::write(&file, config).unwrap();
    let args = ["haproxy", "-db", "-f", &file.display().to_string()].map(str::to_owned).to_vec();
    ServerRecipe {
        words: args,
        count_source: ServerCountSource::Haproxy { log: fixture.path("server.out"), stats },
    }
}

/// Recipe of Apache's httpd, whose listener defers accepts by default.
pub(super) fn apache(fixture: &ServerFixture) -> ServerRecipe {
    let folder = fixture.path("apache");
    fs::create_dir(&folder).unwrap();
    let path = folder.display();
    let [http, _] = BACKEND_PORTS;
    let modules = ["mpm_event", "authz_core", "http2", "proxy", "proxy_http"];
    let modules: String = modules
        .iter()
        .map(|name| format!("LoadModule {name}_module /usr/lib/apache2/modules/mod_{name}.so\n"))
        .collect();
    let config = format!(
        "{modules}
ServerRoot {path}
ServerName pod
PidFile {path}/pid
DefaultRuntimeDir {path}
User nobody
Group nogroup
Listen {SERVING_PORT}
Protocols h2c http/1.1
H2MinWorkers 32
ErrorLog /dev/stderr
# The 101 of an Upgrade to HTTP/2 is not the final response: the same request has another line.
CustomLog {path}/log %>s \"expr=!(%{{REQUEST_STATUS}} -eq 101 && %{{HTTP:Upgrade}} == 'h2c')\"
Timeout 3600
MaxKeepAliveRequests 0
ProxyPass / http://127.0.0.1:{http}/ upgrade=websocket
<Location /early>
  LimitRequestBody 1000
</Location>
"
    );
    let file = folder.join("conf");
    fs::write(&file, config).unwrap();
    let file = file.display().to_string();
    let args = ["apache2", "-D", "FOREGROUND", "-f", &file].map(str::to_owned).to_vec();
    ServerRecipe {
        words: args,
        count_source: ServerCountSource::Apache {
            log: folder.join("log"),
            backend: fixture.request_record(),
        },
    }
}
