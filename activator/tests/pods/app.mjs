// The same as app.py, on node's own server.
import { appendFileSync } from 'node:fs'
import { createServer } from 'node:http'

const respond = (request, response) => {
  // The test's file gets a line before anything is sent, if it names one.
  if (process.env.REQUEST_LOG) {
    appendFileSync(process.env.REQUEST_LOG, `${request.method} ${request.url}\n`)
  }
  if (request.url === '/early') {
    response.writeHead(413, { 'Content-Length': 4, Connection: 'close' })
    return response.end('big\n')
  }
  if (request.url === '/reject') {
    response.writeHead(401, { 'Content-Length': 3, Connection: 'close' })
    return response.end('no\n')
  }
  if (request.headers.expect) response.writeContinue()
  let count = 0
  request.on('data', (data) => { count += data.length })
  request.on('end', () => {
    const many = /^\/many\?n=(\d+)/.exec(request.url)
    for (let i = 0; many && i < Number(many[1]); i++) response.setHeader(`X-Line-${i}`, 'v')
    const text = `${request.method} ${request.url} ${count}\n`
    response.setHeader('Content-Length', Buffer.byteLength(text, 'latin1'))
    response.end(request.method === 'HEAD' ? '' : Buffer.from(text, 'latin1'))
  })
}

const server = createServer(respond)
server.on('checkContinue', respond)
server.listen(0, '127.0.0.1', () => console.log(server.address().port))
process.stdin.on('end', () => process.exit(0)).resume()
