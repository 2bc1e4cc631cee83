//! Pure: what holds for all services, from protobuf and back.

use super::{
    super::{RequestLog, Settings},
    Checked, Refused, raw,
};
use crate::request_log::Template;

impl TryFrom<raw::Settings> for Settings {
    type Error = Refused;
    fn try_from(it: raw::Settings) -> Checked<Self> {
        Ok(Self { request_log: it.request_log.map(RequestLog::try_from).transpose()? })
    }
}

impl From<Settings> for raw::Settings {
    fn from(it: Settings) -> Self {
        Self { request_log: it.request_log.map(Into::into) }
    }
}

impl TryFrom<raw::RequestLog> for RequestLog {
    type Error = Refused;
    fn try_from(it: raw::RequestLog) -> Checked<Self> {
        let template = Template::parse(&it.template).map_err(|bad| {
            Refused::new("request_log.template", bad, "must be one that can be carried out")
        })?;
        Ok(Self { template, probes: it.probes })
    }
}

impl From<RequestLog> for raw::RequestLog {
    fn from(it: RequestLog) -> Self {
        Self { template: it.template.source().to_owned(), probes: it.probes }
    }
}
