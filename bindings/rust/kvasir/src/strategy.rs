//! Strategies: which sealed pages attention reads.
use kvasir_sys as sys;

use crate::ffi::{self, call, Owned};
use crate::{Error, Result};

/// A strategy with its parameters. The calls that receive one copy it.
///
/// | name | reads | parameters |
/// |---|---|---|
/// | "auto" | "full" up to 4096 sealed tokens, then "bounded" | B D H `coverage` |
/// | "full" | everything | none |
/// | "window" | sinks and window only | D |
/// | "bounded" | what a sketch of the keys finds, and a sample of the rest | B D H `coverage` |
/// | "quest" | blocks with the largest upper bounds (Quest) | B D H `select_tokens` |
/// | "flat" | tokens with the largest scores, by an int8 scan | B D H |
/// | "dipr" | tokens above a share of the largest, by a scan | B D H `alpha` |
/// | "dipr-graph" | the same, by the graph of "ood" | B D H `alpha` |
/// | "ood" | tokens found in a graph built from queries (RetrievalAttention) | B D H |
/// | "hnsw" | tokens found in a graph built from keys | B D H |
/// | "filter-layers" | what a few layers choose for those after them (OmniKV) | B `layers` |
///
/// B: `budget_tokens` or `budget_fraction`; the one set last counts. D: `dense_layers`. H:
/// `share_heads`. Prefill takes "full", "bounded", "quest", "flat", "window" and "filter-layers",
/// with `exact_tokens`; `budget_fraction` except for "window"; and `layers`.
///
/// A parameter that does not fit is [`Error::BadArgument`] of the call that receives the strategy.
///
/// ```
/// use kvasir::{SessionOptions, Strategy};
///
/// let options = SessionOptions::new().decode(Strategy::quest().budget_tokens(2048));
/// let options = options.prefill("bounded"); // a name alone: its defaults
/// ```
#[derive(Clone, Debug, PartialEq)]
#[must_use]
pub struct Strategy {
    name: String,
    params: Vec<(Param, f64)>,
    layers: Vec<u32>,
}

/// A parameter of a strategy, for [`Strategy::get`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Param {
    /// [`Strategy::budget_tokens`]; 0 while the fraction counts.
    BudgetTokens,
    /// [`Strategy::budget_fraction`]; 0 while the tokens count.
    BudgetFraction,
    /// [`Strategy::dense_layers`].
    DenseLayers,
    /// [`Strategy::share_heads`]: 1 or 0.
    ShareHeads,
    /// [`Strategy::alpha`].
    Alpha,
    /// [`Strategy::coverage`].
    Coverage,
    /// [`Strategy::select_tokens`]; 0: the default.
    SelectTokens,
    /// [`Strategy::exact_tokens`].
    ExactTokens,
    /// A number of `kvasir_experimental.h`.
    #[cfg(feature = "experimental")]
    Experimental(u32),
}

impl Param {
    fn raw(self) -> u32 {
        match self {
            Param::BudgetTokens => sys::KV_PARAM_BUDGET_TOKENS,
            Param::BudgetFraction => sys::KV_PARAM_BUDGET_FRACTION,
            Param::DenseLayers => sys::KV_PARAM_DENSE_LAYERS,
            Param::ShareHeads => sys::KV_PARAM_SHARE_HEADS,
            Param::Alpha => sys::KV_PARAM_ALPHA,
            Param::Coverage => sys::KV_PARAM_COVERAGE,
            Param::SelectTokens => sys::KV_PARAM_SELECT_TOKENS,
            Param::ExactTokens => sys::KV_PARAM_EXACT_TOKENS,
            #[cfg(feature = "experimental")]
            Param::Experimental(number) => number,
        }
    }
}

macro_rules! named {
    ($($function:ident = $name:literal,)*) => {
        $(
            #[doc = concat!("Creates \"", $name, "\" with its defaults.")]
            pub fn $function() -> Strategy {
                Strategy::new($name)
            }
        )*
    };
}

impl Strategy {
    /// Creates a strategy by its name, with its defaults.
    pub fn new(name: impl Into<String>) -> Strategy {
        Strategy { name: name.into(), params: Vec::new(), layers: Vec::new() }
    }

    named! {
        auto = "auto",
        full = "full",
        window = "window",
        bounded = "bounded",
        quest = "quest",
        flat = "flat",
        dipr = "dipr",
        dipr_graph = "dipr-graph",
        ood = "ood",
        hnsw = "hnsw",
        filter_layers = "filter-layers",
    }

    /// Sets the tokens per layer and head, as a mean over layers; at least 1.
    pub fn budget_tokens(self, tokens: u64) -> Strategy {
        self.set(Param::BudgetTokens, tokens as f64)
    }

    /// Sets the budget as a part of the sealed tokens, over 0 to 1. Default, with a minimum of 512
    /// tokens: "bounded" 0.01; "quest", "flat", "ood" and "hnsw" 0.02; "filter-layers" 0.067.
    /// "dipr" and "dipr-graph": 0.1, at least 1024 tokens, as an upper limit. Prefill: 0.1, at
    /// least 2048 tokens.
    pub fn budget_fraction(self, fraction: f64) -> Strategy {
        self.set(Param::BudgetFraction, fraction)
    }

    /// Sets the number of layers with full attention: those that the strategy serves worst.
    /// Default: "quest" 2, others 0.
    pub fn dense_layers(self, layers: u32) -> Strategy {
        self.set(Param::DenseLayers, f64::from(layers))
    }

    /// `true` (default): one selection per group of query heads; `false`: one per query head.
    pub fn share_heads(self, share: bool) -> Strategy {
        self.set(Param::ShareHeads, f64::from(u8::from(share)))
    }

    /// Sets the smallest attention to read, as a part of the largest token's, over 0 to 1.
    /// Default: 0.012.
    pub fn alpha(self, alpha: f64) -> Strategy {
        self.set(Param::Alpha, alpha)
    }

    /// Sets 1 - the expected standard error of the sampled attention, between 0 and 1. Default:
    /// 0.96 with the default budget; with another the budget alone decides.
    pub fn coverage(self, coverage: f64) -> Strategy {
        self.set(Param::Coverage, coverage)
    }

    /// Sets how many neighbouring tokens are selected together: a multiple of 16 (of 8 where
    /// `head_dim` is over 128, of 4 where it is over 256) up to 1024. Default: 16 (8, 4).
    pub fn select_tokens(self, tokens: u32) -> Strategy {
        self.set(Param::SelectTokens, f64::from(tokens))
    }

    /// Prefill only: sets the number of exact tokens at the end of each prefill. Default: 0.
    pub fn exact_tokens(self, tokens: u64) -> Strategy {
        self.set(Param::ExactTokens, tokens as f64)
    }

    /// Sets the layers of "filter-layers", from 0, ascending. Default: three layers spread evenly
    /// (one in eight if the model has fewer than 24).
    pub fn layers(mut self, layers: impl Into<Vec<u32>>) -> Strategy {
        self.layers = layers.into();
        self
    }

    /// Sets a parameter of `kvasir_experimental.h` by its number.
    #[cfg(feature = "experimental")]
    pub fn experimental(self, number: u32, value: f64) -> Strategy {
        self.set(Param::Experimental(number), value)
    }

    fn set(mut self, param: Param, value: f64) -> Strategy {
        self.params.push((param, value));
        self
    }

    /// The name.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Returns a parameter, or its default where it is not set.
    ///
    /// # Errors
    /// `BadArgument`: the strategy has no such parameter, or one of those that were set does not
    /// fit.
    pub fn get(&self, param: Param) -> Result<f64> {
        let (strategy, mut value) = (self.raw()?, 0.0);
        // SAFETY: the strategy is open.
        call(|error| unsafe {
            sys::kv_strategy_get(strategy.raw(), param.raw(), &mut value, error)
        })?;
        Ok(value)
    }

    /// The C strategy.
    pub(crate) fn raw(&self) -> Result<Owned<sys::kv_strategy>> {
        let name = ffi::string(&self.name, "strategy")?;
        // SAFETY: the name is terminated.
        let strategy = Owned::open(|out, error| unsafe {
            sys::kv_strategy_create(name.as_ptr(), out, error)
        })?;
        for &(param, value) in &self.params {
            // SAFETY: the strategy is open.
            call(|error| unsafe {
                sys::kv_strategy_set(strategy.raw(), param.raw(), value, error)
            })?;
        }
        if !self.layers.is_empty() {
            let (layers, count) = (self.layers.as_ptr(), self.layers.len());
            // SAFETY: the strategy is open; there are `count` layers.
            call(|error| unsafe {
                sys::kv_strategy_set_layers(strategy.raw(), layers, count, error)
            })?;
        }
        Ok(strategy)
    }
}

impl Default for Strategy {
    fn default() -> Strategy {
        Strategy::auto()
    }
}

impl From<&str> for Strategy {
    fn from(name: &str) -> Strategy {
        Strategy::new(name)
    }
}

impl From<String> for Strategy {
    fn from(name: String) -> Strategy {
        Strategy::new(name)
    }
}

impl From<&Strategy> for Strategy {
    fn from(strategy: &Strategy) -> Strategy {
        strategy.clone()
    }
}

/// Description of a strategy.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct StrategyInfo {
    /// For [`Strategy::new`].
    pub name: String,
    /// Minimum tokens of the default `budget_fraction`; 0: no budget.
    pub budget_floor: u64,
    /// [`SessionOptions::prefill`](crate::SessionOptions::prefill) takes it.
    pub prefill: bool,
    /// [`CacheOptions::decode`](crate::CacheOptions::decode) takes it.
    pub cache: bool,
    /// It searches an index: [`Session::prepare`](crate::Session::prepare).
    pub index: bool,
    /// It may disappear in any version.
    pub experimental: bool,
}

/// Lists the strategies. "auto", a choice between two, is not listed.
///
/// # Errors
/// None in practice; those of any call.
pub fn strategies() -> Result<Vec<StrategyInfo>> {
    let mut all = Vec::new();
    for index in 0.. {
        let mut info = ffi::sized::<sys::kv_strategy_info>();
        // SAFETY: the struct has its size.
        match call(|error| unsafe { sys::kv_strategy_list(index, &mut info, error) }) {
            Err(Error::NotFound(_)) => break,
            other => other?,
        }
        let has = |flag| info.flags & flag != 0;
        all.push(StrategyInfo {
            name: ffi::text(&info.name),
            budget_floor: info.budget_floor,
            prefill: has(sys::KV_STRATEGY_PREFILL),
            cache: has(sys::KV_STRATEGY_CACHE),
            index: has(sys::KV_STRATEGY_INDEX),
            experimental: has(sys::KV_STRATEGY_EXPERIMENTAL),
        });
    }
    Ok(all)
}
