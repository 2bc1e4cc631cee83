//! Pure: `config-observability`: request logs and URLs of logs; and `config-tracing`, which it replaced.
//!
//! Activators export traces and the metrics of requests. Values that Knative refuses are refused all the same.
//!
//! Keys, defaults, bounds and messages: knative/serving `pkg/observability` at 98e5ef9, knative/pkg `observability` at
//! 521cb33.

use std::time::Duration;

use common::{
    request_log::{self, LogTemplate},
    wire::{
        EndpointFault, OtlpCollector, OtlpProtocol, RequestLogSettings, RequestMetricsSettings,
        SamplingRate, TelemetrySettings, TraceSettings,
    },
};

use super::{ConfigMapSettings, keys::ConfigMapReader, network::FALSE_TEXTS};
use crate::model::go_values::GoDuration;

/// Protocol, endpoint and interval of the metrics of components.
const METRICS_KEYS: [&str; 3] = ["metrics-protocol", "metrics-endpoint", "metrics-export-interval"];
/// Protocol, endpoint and interval of the metrics of Knative's sidecar.
const SIDECAR_METRICS_KEYS: [&str; 3] =
    ["request-metrics-protocol", "request-metrics-endpoint", "request-metrics-export-interval"];
/// Shortest time between two exports, so that a typing error does not flood the collector.
const SHORTEST_INTERVAL: Duration = Duration::from_secs(1);

/// `config-observability`, checked against its bounds.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ObservabilityConfig {
    /// `logging.revision-url-template`, in which `${REVISION_UID}` is replaced. Default empty: no `logUrl`.
    pub log_url_template: String,
    /// Request log: `logging.enable-request-log`, `logging.request-log-template` (default Knative's `httpRequest` line)
    /// and `logging.enable-probe-request-log` (default false). Default none: requests are not logged.
    pub request_log: Option<RequestLogSettings>,
    /// Traces of activators (`tracing-*`) and metrics of requests (`metrics-*`). Default: neither.
    pub telemetry: TelemetrySettings,
}

impl ObservabilityConfig {
    /// Returns true if only activators can do what is set, so that no connection may take the direct path.
    pub fn needs_activator(&self) -> bool {
        self.request_log.is_some()
    }

    /// URL of a Revision's log; `None` if no template is set.
    pub fn log_url(&self, revision_uid: &str) -> Option<String> {
        let template = Some(self.log_url_template.as_str()).filter(|it| !it.is_empty());
        template.map(|it| it.replace("${REVISION_UID}", revision_uid))
    }
}

impl ConfigMapSettings for ObservabilityConfig {
    const NAME: &'static str = "config-observability";

    fn read(keys: &mut ConfigMapReader<'_>) -> Self {
        accept_older_keys(keys);
        let mut it = Self::default();
        it.telemetry.metrics = read_metrics(keys);
        check_sidecar_metrics(keys);
        it.telemetry.traces = read_traces(keys);
        check_profiling(keys);
        check_var_log(keys);
        keys.read_text("logging.revision-url-template", &mut it.log_url_template);
        it.request_log = read_request_log(keys);
        it
    }
}

fn accept_older_keys(keys: &mut ConfigMapReader<'_>) {
    keys.accept_superseded(&[
        ("metrics.backend-destination", "metrics-protocol"),
        ("metrics.opencensus-address", "metrics-endpoint"),
        ("metrics.opencensus-require-tls", "metrics-endpoint"),
        ("metrics.reporting-period-seconds", "metrics-export-interval"),
        ("metrics.request-metrics-backend-destination", "request-metrics-protocol"),
        ("metrics.request-metrics-reporting-period-seconds", "request-metrics-export-interval"),
        ("metrics.allow-stackdriver-custom-metrics", "metrics-protocol"),
        ("metrics.stackdriver-project-id", "metrics-endpoint"),
        ("profiling.enable", "runtime-profiling"),
        ("logging.write-request-logs", "logging.enable-request-log"),
    ]);
}

/// Reads the request metrics of activators.
fn read_metrics(keys: &mut ConfigMapReader<'_>) -> Option<RequestMetricsSettings> {
    let [protocol_key, endpoint_key, interval_key] = METRICS_KEYS;
    let (name, to, every) = read_metrics_export(keys, METRICS_KEYS);
    let interval = if every.0 > 0 {
        every.to_duration().max(SHORTEST_INTERVAL)
    } else {
        RequestMetricsSettings::DEFAULT_INTERVAL
    };
    match (name.as_str(), parse_protocol(&name)) {
        ("prometheus", _) => {
            const WHY: &str = "/metrics is read by Prometheus, at the admin port";
            keys.warn_unless_usual(endpoint_key, &[], WHY);
            keys.warn_unless_usual(interval_key, &[], WHY);
            Some(RequestMetricsSettings { collector: None, interval })
        }
        (_, Some(protocol)) => {
            let collector = read_collector(keys, (protocol_key, endpoint_key), protocol, &to)?;
            Some(RequestMetricsSettings { collector: Some(collector), interval })
        }
        (_, None) => {
            keys.warn_unless_usual(interval_key, &[], &format!("{protocol_key} exports nothing"));
            None
        }
    }
}

/// Checks the settings of the sidecar's metrics, none of which has an effect.
fn check_sidecar_metrics(keys: &mut ConfigMapReader<'_>) {
    const WHY: &str = "there is no sidecar; metrics-protocol exports the metrics of requests";
    read_metrics_export(keys, SIDECAR_METRICS_KEYS);
    // Valid values have no effect either, so each one that asks for an export gets a warning.
    let [protocol, endpoint, interval] = SIDECAR_METRICS_KEYS;
    keys.warn_unless_usual(protocol, &["none", "prometheus"], WHY);
    keys.warn_unless_usual(endpoint, &[], WHY);
    keys.warn_unless_usual(interval, &[], WHY);
}

/// Reads protocol, endpoint and interval of one metrics export, and refuses what Knative refuses.
fn read_metrics_export(
    keys: &mut ConfigMapReader<'_>,
    [protocol, endpoint, interval]: [&'static str; 3],
) -> (String, String, GoDuration) {
    let (mut name, mut to, mut every) = ("none".to_owned(), String::new(), GoDuration::default());
    keys.read_text(protocol, &mut name);
    keys.read_text(endpoint, &mut to);
    keys.read_duration(interval, &mut every);
    // As in Knative, an endpoint is needed exactly where the protocol sends to one.
    match (name.as_str(), to.is_empty()) {
        ("grpc" | "http/protobuf", true) => {
            keys.add_error(format!("endpoint should be set when protocol is {name:?}"));
        }
        ("none", false) => {
            keys.add_error(format!("endpoint should not be set when protocol is {name:?}"));
        }
        ("none", true) | ("grpc" | "http/protobuf", false) | ("prometheus", _) => {}
        (other, _) => keys.add_error(format!("unsupported protocol {other:?}")),
    }
    check_export_interval(keys, every);
    (name, to, every)
}

/// Returns the protocol of OTLP with this name; `None`: nothing is sent.
fn parse_protocol(name: &str) -> Option<OtlpProtocol> {
    match name {
        "grpc" => Some(OtlpProtocol::Grpc),
        "http/protobuf" => Some(OtlpProtocol::HttpProtobuf),
        _ => None,
    }
}

/// Reads the collector of an export. `None`: it is refused, or accepted with a warning because it needs TLS.
fn read_collector(
    keys: &mut ConfigMapReader<'_>,
    (protocol_key, endpoint_key): (&'static str, &'static str),
    protocol: OtlpProtocol,
    endpoint: &str,
) -> Option<OtlpCollector> {
    if endpoint.is_empty() {
        // Refused before.
        return None;
    }
    match OtlpCollector::parse(protocol, endpoint) {
        Ok(collector) => Some(collector),
        Err(fault @ EndpointFault::NotUrl) => {
            keys.add_error(format!("{endpoint_key} is {endpoint:?}: {fault}"));
            None
        }
        Err(fault @ EndpointFault::NeedsTls) => {
            for key in [protocol_key, endpoint_key] {
                keys.add_warning(format!("key {key:?} has no effect: {endpoint:?}: {fault}"));
            }
            None
        }
    }
}

/// Refuses a negative export interval. 0 is Knative's value for a default of the exporter.
fn check_export_interval(keys: &mut ConfigMapReader<'_>, interval: GoDuration) {
    if interval.0 < 0 {
        keys.add_error(format!("export interval \"{interval}\" should be greater than zero"));
    }
}

/// Reads the export of traces.
fn read_traces(keys: &mut ConfigMapReader<'_>) -> Option<TraceSettings> {
    const PROTOCOL: &str = "tracing-protocol";
    const ENDPOINT: &str = "tracing-endpoint";
    const RATE: &str = "tracing-sampling-rate";
    let (mut name, mut to, mut rate) = ("none".to_owned(), String::new(), 0.0);
    keys.read_text(PROTOCOL, &mut name);
    keys.read_text(ENDPOINT, &mut to);
    keys.read_float(RATE, &mut rate);
    // As in Knative, an endpoint is needed exactly where the protocol sends to one.
    match (name.as_str(), to.is_empty()) {
        ("grpc" | "http/protobuf", true) => {
            keys.add_error(format!("endpoint should be set for protocol {name:?}"));
        }
        ("none" | "stdout", false) => {
            keys.add_error("endpoint should not be set when protocol is 'none'");
        }
        ("none" | "stdout", true) | ("grpc" | "http/protobuf", false) => {}
        (other, _) => keys.add_error(format!("unsupported protocol {other:?}")),
    }
    if rate < 0.0 {
        keys.add_error(format!("sampling rate {rate:.6} should be greater or equal to zero"));
    } else if rate > 1.0 {
        keys.add_error(format!("sampling rate {rate:.6} should be less than or equal to one"));
    }
    let Some(protocol) = parse_protocol(&name) else {
        keys.warn_unless_usual(PROTOCOL, &["none"], "traces are not written to standard output");
        keys.warn_unless_usual(RATE, &["0", "0.0"], &format!("{PROTOCOL} exports nothing"));
        return None;
    };
    let collector = read_collector(keys, (PROTOCOL, ENDPOINT), protocol, &to);
    let sampling = SamplingRate::from_fraction(rate);
    // An exporter without a request would keep a connection for nothing.
    if sampling.is_never() {
        for key in [PROTOCOL, ENDPOINT] {
            keys.warn_unless_usual(key, &[], &format!("{RATE} is 0, so no request is sampled"));
        }
        return None;
    }
    Some(TraceSettings { collector: collector?, sampling })
}

fn check_profiling(keys: &mut ConfigMapReader<'_>) {
    const INTERVAL: &str = "runtime-export-interval";
    let (mut setting, mut every) = ("disabled".to_owned(), GoDuration::default());
    keys.read_text("runtime-profiling", &mut setting);
    keys.read_duration(INTERVAL, &mut every);
    check_export_interval(keys, every);
    keys.accept_without_effect(&[(INTERVAL, "it is about Go's own memory figures")]);
    if !["enabled", "disabled"].contains(&setting.as_str()) {
        keys.add_error(format!("unsupported profile setting {setting:?}"));
    }
    keys.warn_unless_usual("runtime-profiling", &["disabled"], "no component serves a profiler");
}

fn check_var_log(keys: &mut ConfigMapReader<'_>) {
    let (key, mut is_enabled) = ("logging.enable-var-log-collection", false);
    keys.read_bool(key, &mut is_enabled);
    keys.warn_unless_usual(
        key,
        &FALSE_TEXTS,
        "what a container writes to its standard output is collected",
    );
}

/// Reads the request log. A template that cannot run is refused even while request logs are off.
fn read_request_log(keys: &mut ConfigMapReader<'_>) -> Option<RequestLogSettings> {
    const ENABLE: &str = "logging.enable-request-log";
    const TEMPLATE: &str = "logging.request-log-template";
    const PROBES: &str = "logging.enable-probe-request-log";
    let (mut is_enabled, mut probes) = (false, false);
    keys.read_bool(ENABLE, &mut is_enabled);
    keys.read_bool(PROBES, &mut probes);
    if probes && !is_enabled {
        keys.add_warning(format!("{PROBES} has no effect: {ENABLE} is off"));
    }
    let source = keys.get(TEMPLATE).map_or(request_log::DEFAULT_TEMPLATE, str::trim);
    if source.is_empty() && is_enabled {
        keys.add_error(format!("{ENABLE:?} was set to true, but no {TEMPLATE:?} was specified"));
    }
    match LogTemplate::parse(source) {
        Ok(template) => {
            // A template that begins with `{` is meant to be JSON, which unescaped text of clients would break.
            let bare =
                if source.starts_with('{') { template.unescaped_values() } else { Vec::new() };
            for field in bare {
                keys.add_warning(format!(
                    "{TEMPLATE}: clients choose {field} freely: write it with js"
                ));
            }
            is_enabled.then_some(RequestLogSettings { template, logs_probes: probes })
        }
        Err(error) => {
            keys.add_error(format!("{TEMPLATE}: {error}"));
            None
        }
    }
}

/// `config-tracing`, in which no key has an effect any more.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct TracingConfig;

impl ConfigMapSettings for TracingConfig {
    const NAME: &'static str = "config-tracing";

    fn read(keys: &mut ConfigMapReader<'_>) -> Self {
        let all: Vec<_> = keys.all_keys().map(|(key, _)| key).collect();
        for key in all {
            keys.add_warning(format!("key {key:?} has no effect: use config-observability"));
        }
        Self
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::{
        config_maps::{ParsedConfigMap, read},
        problem::problems_line,
    };

    fn map(pairs: &[(&str, &str)]) -> Result<ParsedConfigMap<ObservabilityConfig>, String> {
        let data = pairs.iter().map(|&(key, text)| (key.into(), text.into())).collect();
        read::<ObservabilityConfig>(&data).map_err(|it| problems_line(&it))
    }

    #[test]
    fn every_key_is_followed() {
        assert_eq!(map(&[]).map(|it| it.value), Ok(ObservabilityConfig::default()));
        let expected = ObservabilityConfig {
            log_url_template: "http://log/${REVISION_UID}".into(),
            request_log: Some(RequestLogSettings {
                template: LogTemplate::parse("{{.Request.Method}}").unwrap(),
                logs_probes: true,
            }),
            telemetry: TelemetrySettings::default(),
        };
        let read = map(&[
            ("metrics-protocol", "none"),
            ("request-metrics-protocol", "prometheus"),
            ("tracing-protocol", "none"),
            ("tracing-sampling-rate", "0"),
            ("runtime-profiling", "disabled"),
            ("logging.enable-var-log-collection", "false"),
            ("logging.revision-url-template", "http://log/${REVISION_UID}"),
            ("logging.enable-request-log", "true"),
            ("logging.enable-probe-request-log", "true"),
            ("logging.request-log-template", "{{.Request.Method}}"),
        ]);
        assert_eq!(read, Ok(ParsedConfigMap { value: expected.clone(), warnings: vec![] }));
        assert_eq!(expected.log_url("u-1").as_deref(), Some("http://log/u-1"));
        assert!(expected.needs_activator() && !ObservabilityConfig::default().needs_activator());
        assert_eq!(ObservabilityConfig::default().log_url("u-1"), None);
    }

    #[test]
    fn each_setting_without_effect_gets_a_warning() {
        let read = map(&[
            ("metrics-protocol", "http/protobuf"),
            ("metrics-endpoint", "https://a/v1"),
            ("request-metrics-protocol", "grpc"),
            ("request-metrics-endpoint", "http://b:4317"),
            ("request-metrics-export-interval", "60s"),
            ("tracing-protocol", "grpc"),
            ("tracing-endpoint", "b:4317"),
            ("tracing-sampling-rate", "0.25"),
            ("runtime-profiling", "enabled"),
            ("logging.enable-var-log-collection", "true"),
        ]);
        let read = read.unwrap();
        assert_eq!(read.value, ObservabilityConfig::default());
        assert_eq!(read.warnings.len(), 9, "{:?}", read.warnings);
        for (pairs, expected) in [
            (
                &[("tracing-protocol", "grpc"), ("tracing-endpoint", "http://a:1")][..],
                ["tracing-protocol", "tracing-endpoint"],
            ),
            (
                &[("tracing-protocol", "stdout"), ("tracing-sampling-rate", "0.5")],
                ["tracing-protocol", "tracing-sampling-rate"],
            ),
            (
                &[
                    ("metrics-protocol", "prometheus"),
                    ("metrics-endpoint", ":9090"),
                    ("metrics-export-interval", "1m"),
                ],
                ["metrics-endpoint", "metrics-export-interval"],
            ),
        ] {
            let warnings = map(pairs).unwrap().warnings;
            let begins = expected.map(|key| format!("key {key:?} has no effect: "));
            assert_eq!(warnings.len(), 2, "{warnings:?}");
            assert!(warnings.iter().zip(begins).all(|(it, begin)| it.starts_with(&begin)));
        }
    }

    #[test]
    fn telemetry_is_followed() {
        let collector = |protocol, text: &str| OtlpCollector::parse(protocol, text).unwrap();
        let read = |pairs: &[(&str, &str)]| {
            let read = map(pairs).unwrap();
            assert_eq!(read.warnings, [""; 0]);
            read.value.telemetry
        };
        let traces = TraceSettings {
            collector: collector(OtlpProtocol::Grpc, "http://a:4317"),
            sampling: SamplingRate::from_fraction(0.25),
        };
        let metrics = |text: &str, seconds| RequestMetricsSettings {
            collector: Some(collector(OtlpProtocol::HttpProtobuf, text)),
            interval: Duration::from_secs(seconds),
        };
        let tracing = [
            ("tracing-protocol", "grpc"),
            ("tracing-endpoint", "http://a:4317"),
            ("tracing-sampling-rate", "0.25"),
        ];
        let expected = TelemetrySettings { traces: Some(traces), metrics: None };
        assert_eq!(read(&tracing), expected);
        let protocol = ("metrics-protocol", "http/protobuf");
        let endpoint = ("metrics-endpoint", "http://b/v1/metrics");
        let interval = |text| ("metrics-export-interval", text);
        for (pairs, seconds) in [
            (&[protocol, endpoint][..], 60),
            (&[protocol, endpoint, interval("0s")], 60),
            (&[protocol, endpoint, interval("5s")], 5),
            (&[protocol, endpoint, interval("1ms")], 1),
        ] {
            let expected = metrics("http://b/v1/metrics", seconds);
            assert_eq!(read(pairs).metrics, Some(expected), "{pairs:?}");
        }
        let page = read(&[("metrics-protocol", "prometheus")]).metrics;
        assert_eq!(page.map(|it| it.collector), Some(None));
    }

    #[test]
    fn every_refusal_is_in_knatives_words() {
        for (pairs, expected) in [
            (&[("metrics-protocol", "carbon")][..], "unsupported protocol \"carbon\""),
            (&[("metrics-protocol", "grpc")], "endpoint should be set when protocol is \"grpc\""),
            (
                &[("request-metrics-endpoint", "x")],
                "endpoint should not be set when protocol is \"none\"",
            ),
            (
                &[("metrics-export-interval", "-1s")],
                "export interval \"-1s\" should be greater than zero",
            ),
            (&[("tracing-protocol", "zipkin")], "unsupported protocol \"zipkin\""),
            (
                &[("metrics-protocol", "grpc"), ("metrics-endpoint", "http://a:b")],
                "metrics-endpoint is \"http://a:b\": must be a URL such as \
                 http://collector.observability:4317",
            ),
            (
                &[("tracing-sampling-rate", "1.5")],
                "sampling rate 1.500000 should be less than or equal to one",
            ),
            (&[("runtime-profiling", "on")], "unsupported profile setting \"on\""),
            (
                &[("runtime-export-interval", "-1s")],
                "export interval \"-1s\" should be greater than zero",
            ),
            (
                &[("runtime-export-interval", "often")],
                "failed to parse \"runtime-export-interval\": time: invalid duration \"often\"",
            ),
            (
                &[("logging.enable-request-log", "true"), ("logging.request-log-template", "")],
                "\"logging.enable-request-log\" was set to true, but no \
                 \"logging.request-log-template\" was specified",
            ),
        ] {
            assert_eq!(map(pairs), Err(expected.to_owned()), "{pairs:?}");
        }
    }

    #[test]
    fn request_logs_have_knatives_template_or_a_supported_one() {
        const TEMPLATE: &str = "logging.request-log-template";
        let enabled = ("logging.enable-request-log", "true");
        let source = |pairs: &[(&str, &str)]| {
            let log = map(pairs).unwrap().value.request_log;
            log.map(|log| (log.template.source().to_owned(), log.logs_probes))
        };
        assert_eq!(source(&[enabled]), Some((request_log::DEFAULT_TEMPLATE.to_owned(), false)));
        assert_eq!(
            source(&[enabled, (TEMPLATE, " {{.TraceID}}\n")]),
            Some(("{{.TraceID}}".into(), false))
        );
        assert_eq!(source(&[(TEMPLATE, "{{.TraceID}}")]), None);
        for pairs in [
            &[(TEMPLATE, "a\n{{if .TraceID}}b{{end}}")][..],
            &[enabled, (TEMPLATE, "a\n{{if .TraceID}}b{{end}}")],
        ] {
            let problems = map(pairs).unwrap_err();
            let expected = "logging.request-log-template: template: requestLog:2:3: \"if\" is not supported; a template may have";
            assert!(problems.starts_with(expected), "{problems}");
        }
        let bare = map(&[enabled, (TEMPLATE, r#"{"a": "{{.Request.Host}}"}"#)]).unwrap().warnings;
        assert_eq!(
            bare,
            ["logging.request-log-template: clients choose .Request.Host freely: write it with js"]
        );
    }

    #[test]
    fn keys_of_the_opencensus_era_name_their_successors() {
        let read = map(&[("metrics.backend-destination", "prometheus")]).unwrap();
        let expected = "key \"metrics.backend-destination\" is of an older release and has no effect: \
                    use \"metrics-protocol\"";
        assert_eq!(
            (read.value, read.warnings),
            (ObservabilityConfig::default(), vec![expected.into()])
        );
    }
}
