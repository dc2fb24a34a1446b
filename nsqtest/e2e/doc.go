// Package e2e has no code of its own. Its tests run the consumer of package nsq against a real nsqd and nsqlookupd: through all
// layers, through restarts, crashes and freezes, and over links that break.
//
// Each test keeps a ledger of numbered messages, so that each of them is accounted for: handled at least once, and again only for
// a reason. What nsqd says about itself (statistics) is asked rather than the consumer wherever both could tell.
package e2e
