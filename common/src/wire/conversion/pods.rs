//! Pure: conversion of the pods of a RouteTable and their probes.

use super::*;

impl TryFrom<raw::Pod> for PodEntry {
    type Error = WireError;
    fn try_from(message: raw::Pod) -> WireResult<Self> {
        let phase = match message.phase() {
            raw::PodPhase::Starting => RoutingPhase::Starting,
            raw::PodPhase::Ready => RoutingPhase::Ready,
            raw::PodPhase::Draining => RoutingPhase::Draining,
            raw::PodPhase::Unspecified => {
                return Err(WireError::new("pod.phase", message.phase, "must be a known phase"));
            }
        };
        let address = parse_socket_address("pod.address", &message.address, message.port)?;
        // Receivers route to each ready pod without checking again that it has an address.
        if phase == RoutingPhase::Ready && address.is_none() {
            return Err(WireError::new("pod.address", "", "a ready pod has an address"));
        }
        Ok(Self {
            uid: require_nonempty("pod.uid", message.uid)?,
            name: message.name,
            revision: parse_revision_name(&message.revision)?,
            node: message.node,
            zone: message.zone,
            hints: TopologyHints { zone: message.for_zone.into(), node: message.for_node.into() },
            phase,
            address,
            other_family_address: parse_optional_address("pod.also", &message.also)?,
            kubelet_ready: message.confirmed,
            // A report decides only on the way to ready, and names the address that it must match.
            awaits_report: message.by_report
                && phase == RoutingPhase::Starting
                && address.is_some(),
            port: parse_port("pod.port", message.port)?,
            probe: require("pod.probe", message.probe)?.try_into()?,
            ports: parse_pod_ports(message.ports)?,
            keeps_binds: message.keeps_binds,
            standby: parse_standby(message.standby, phase)?,
            container_restarts: message.container_restarts,
        })
    }
}

/// Parses the standby order of a pod. A draining pod has none, since it must be able to end its last requests.
fn parse_standby(
    message: Option<raw::StandbyOrder>,
    phase: RoutingPhase,
) -> WireResult<Option<StandbyOrder>> {
    let order = message.map(StandbyOrder::try_from).transpose()?;
    Ok(order.filter(|_| phase != RoutingPhase::Draining))
}

/// Parses the ports of a pod and sorts them by `service_port`.
fn parse_pod_ports(all: Vec<raw::PodPort>) -> WireResult<Vec<PodPort>> {
    let mut ports = all.into_iter().map(PodPort::try_from).collect::<WireResult<Vec<_>>>()?;
    ports.sort_unstable_by_key(|it| it.service_port);
    // Two ports of the pod for one of the Service: connections would depend on the order of the message.
    match ports.windows(2).find(|pair| pair[0].service_port == pair[1].service_port) {
        Some(pair) => {
            let rule = "a service port leads to one port of a pod";
            Err(WireError::new("pod.ports", pair[0].service_port, rule))
        }
        None => Ok(ports),
    }
}

impl From<PodEntry> for raw::Pod {
    fn from(value: PodEntry) -> Self {
        let phase = match value.phase {
            RoutingPhase::Starting => raw::PodPhase::Starting,
            RoutingPhase::Ready => raw::PodPhase::Ready,
            RoutingPhase::Draining => raw::PodPhase::Draining,
        };
        Self {
            uid: value.uid,
            name: value.name,
            revision: value.revision.to_string(),
            node: value.node,
            zone: value.zone,
            phase: phase.into(),
            address: value.address.map(|at| address_octets(at.ip())).unwrap_or_default(),
            port: value.port.get().into(),
            probe: Some(value.probe.into()),
            also: value.other_family_address.map(address_octets).unwrap_or_default(),
            confirmed: value.kubelet_ready,
            for_zone: value.hints.zone.into(),
            for_node: value.hints.node.into(),
            ports: value.ports.into_iter().map(Into::into).collect(),
            keeps_binds: value.keeps_binds,
            by_report: value.awaits_report,
            standby: value.standby.map(Into::into),
            container_restarts: value.container_restarts,
        }
    }
}

impl TryFrom<raw::PodPort> for PodPort {
    type Error = WireError;
    fn try_from(message: raw::PodPort) -> WireResult<Self> {
        Ok(Self {
            service_port: parse_port("pod_port.service_port", message.service_port)?,
            port: parse_port("pod_port.port", message.port)?,
            protocol: parse_protocol("pod_port.protocol", message.protocol)?,
        })
    }
}

impl From<PodPort> for raw::PodPort {
    fn from(value: PodPort) -> Self {
        Self {
            service_port: value.service_port.get().into(),
            port: value.port.get().into(),
            protocol: raw_protocol(value.protocol),
        }
    }
}

impl TryFrom<raw::Probe> for ReadinessProbe {
    type Error = WireError;
    fn try_from(message: raw::Probe) -> WireResult<Self> {
        use raw::probe::How;
        let handler = match require("probe.how", message.how)? {
            How::Listen(_) => ProbeHandler::Listen,
            How::Tcp(_) => ProbeHandler::Tcp,
            How::Http(http) => ProbeHandler::Http {
                path: http.path,
                headers: http
                    .headers
                    .into_iter()
                    .map(|header| (header.name, header.value))
                    .collect(),
                host: http.host,
                https: http.https,
            },
            How::Grpc(grpc) => ProbeHandler::Grpc { service: grpc.service },
        };
        // 0 is no port, so it can stand for the serving port.
        let port =
            if message.port == 0 { None } else { Some(parse_port("probe.port", message.port)?) };
        Ok(Self {
            handler,
            port,
            period: Duration::from_millis(message.period_ms),
            timeout: Duration::from_millis(message.timeout_ms),
            // A sender may omit the thresholds; Kubernetes allows none below 1.
            success_threshold: message.success_threshold.max(1),
            failure_threshold: message.failure_threshold.max(1),
        })
    }
}

impl From<ReadinessProbe> for raw::Probe {
    fn from(probe: ReadinessProbe) -> Self {
        use raw::probe::How;
        let header = |(name, value)| raw::Header { name, value };
        let how = match probe.handler {
            ProbeHandler::Listen => How::Listen(raw::Empty {}),
            ProbeHandler::Tcp => How::Tcp(raw::Empty {}),
            ProbeHandler::Http { path, headers, host, https } => How::Http(raw::HttpProbe {
                path,
                headers: headers.into_iter().map(header).collect(),
                host,
                https,
            }),
            ProbeHandler::Grpc { service } => How::Grpc(raw::GrpcProbe { service }),
        };
        Self {
            how: Some(how),
            port: probe.port.map_or(0, |port| port.get().into()),
            period_ms: to_ms(probe.period),
            timeout_ms: to_ms(probe.timeout),
            success_threshold: probe.success_threshold,
            failure_threshold: probe.failure_threshold,
        }
    }
}
