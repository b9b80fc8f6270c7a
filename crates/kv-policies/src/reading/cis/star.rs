//! CIS* (PrHS): [`Cis`] whose sets, neighbours included, have the budget's size, so that steps read
//! as much as other policies of an equal budget.

use std::sync::Arc;

use super::{Cis, CisOptions};
use crate::policy::config::Config;
use crate::{Policy, Result};

const NAME: &str = "cis-star";

impl Cis {
    /// CIS*: `k` is set so that index sets, neighbours included, have the budget's size.
    ///
    /// # Errors
    /// The errors of [`Self::new`].
    pub fn star(options: CisOptions) -> Result<Self> {
        Self::named(NAME, options, true)
    }

    /// CIS* from its configuration.
    pub(crate) fn star_from_config(config: &mut Config) -> Result<Arc<dyn Policy>> {
        Ok(Arc::new(Self::star(config.take_budgeted(NAME, CisOptions::new)?)?))
    }
}
