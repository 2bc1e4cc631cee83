//! Pure: conversion of rules for certificates of clients, and of the authorities of these.

use super::{certificates::parse_secret_name, *};

impl TryFrom<raw::ClientAuth> for ClientAuth {
    type Error = WireError;
    fn try_from(message: raw::ClientAuth) -> WireResult<Self> {
        // Empty stands for none.
        let named = Some(message.ca).filter(|name| !name.is_empty());
        let ca = named.map(|name| parse_secret_name("client_auth.ca", &name)).transpose()?;
        Ok(Self { ca, is_optional: message.is_optional })
    }
}

impl From<ClientAuth> for raw::ClientAuth {
    fn from(value: ClientAuth) -> Self {
        let ca = value.ca.map(|name| name.to_string()).unwrap_or_default();
        Self { ca, is_optional: value.is_optional }
    }
}

impl TryFrom<raw::ClientCa> for ClientCaEntry {
    type Error = WireError;
    fn try_from(message: raw::ClientCa) -> WireResult<Self> {
        let raw::ClientCa { name, certificates } = message;
        let name = parse_secret_name("client_ca.name", &name)?;
        let material = (!certificates.is_empty()).then(|| Arc::new(ClientCaMaterial(certificates)));
        Ok(Self { name, material })
    }
}

impl From<ClientCaEntry> for raw::ClientCa {
    fn from(value: ClientCaEntry) -> Self {
        let material = value.material.map(Arc::unwrap_or_clone);
        let certificates = material.map(|it| it.0).unwrap_or_default();
        Self { name: value.name.to_string(), certificates }
    }
}
